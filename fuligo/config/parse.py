"""Parser of the arguments of `fuligo train`: defaults, then the `--config` file, then the flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuligo.config import Config
from fuligo.config.assignments import Given, build_config
from fuligo.config.command_line import read_command_line
from fuligo.config.files import read_yaml


@dataclass(frozen=True, slots=True)
class Parsed:
    """Config whose single values are valid; `fuligo.config.validate` checks that they fit together."""

    config: Config
    warnings: tuple[str, ...]


def parse(arguments: Sequence[str]) -> Parsed:
    """Parse the arguments of `fuligo train` (see `command_line` for the syntax).

    Raises:
        ConfigError: unknown flags or keys, or values of the wrong type or range; names all of them, each with its fix.
    """
    line = read_command_line(arguments)
    file = read_yaml(Path(line.config_file)) if line.config_file is not None else Given()
    config = build_config([*file.assignments, *line.assignments], [*file.problems, *line.problems])
    return Parsed(config, (*file.warnings, *line.warnings))
