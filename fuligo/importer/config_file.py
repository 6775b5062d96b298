"""The launch that a script would make, as a config file: only what the script gives, under its groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fuligo.config import Config
from fuligo.config.assignments import Assignment, build_config
from fuligo.config.command_line import CONFIG_OPTION, CommandLine, read_command_line
from fuligo.config.flags import flags
from fuligo.config.topology_file import topology_from_text
from fuligo.errors import ConfigError
from fuligo.importer.run import ImportedScript

_TOPOLOGY_OPTION = "--sglang-config"
_WIDTH = 120


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """A config with the names that were given."""

    config: Config
    given: tuple[tuple[str, str], ...]
    """(group, name) of each value that is not a default."""
    warnings: tuple[str, ...]

    def yaml(self) -> str:
        """For `--config`: the given values, in the order of the groups. It makes an equal config again."""
        plain = self.config.model_dump(mode="json")
        chosen = {group: {name: value for name, value in values.items() if (group, name) in self.given} for group, values in plain.items()}
        filled = {group: _without_none(values) for group, values in chosen.items() if values}
        return yaml.safe_dump(filled, sort_keys=False, allow_unicode=True, width=_WIDTH)


def _without_none(value: Any) -> Any:
    """Keys of a topology that were not given."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def imported_config(script: ImportedScript) -> ImportedConfig:
    """The config of the launch: flags, environment block, topology.

    Raises:
        ConfigError: flags that are not known, values that are not valid; all of them.
    """
    arguments, topologies = _without_topology(script.launch.arguments)
    line = read_command_line(arguments)
    if line.config_file is not None:
        raise ConfigError(f"{script.launch.place}: train.py is started with {CONFIG_OPTION} {line.config_file}: that file is the config")
    for file in topologies:
        _inline(script, file, line)
    if script.launch.environment:
        line.assignments.append(Assignment(flags()["env"], dict(script.launch.environment), "the environment of the job"))
    config = build_config(line.assignments, line.problems)
    given = dict.fromkeys((assignment.flag.group, assignment.flag.name) for assignment in line.assignments)
    return ImportedConfig(config, tuple(given), tuple(line.warnings))


def _inline(script: ImportedScript, file: str, line: CommandLine) -> None:
    """The list of models in place of the file: the script's own files exist only while it is evaluated."""
    topology = topology_from_text(script.file_text(file), Path(script.directory, file))
    line.problems += topology.problems
    line.warnings += topology.warnings
    line.assignments.append(Assignment(flags()["sglang_config"], topology.models, _TOPOLOGY_OPTION))


def _without_topology(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The arguments without `--sglang-config`, and its values."""
    rest: list[str] = []
    files: list[str] = []
    pending: Iterator[str] = iter(arguments)
    for argument in pending:
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") == _TOPOLOGY_OPTION:
            files.append(value if equals else next(pending, ""))
        else:
            rest.append(argument)
    return rest, files
