"""`fuligo import-script`: a bash launch script as a config file. Nothing of the script is executed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fuligo.errors import ConfigError

_DESCRIPTION = """\
Turns a bash launch script into a config file. The script is evaluated here, statement by statement; no shell is started,
nothing is executed, written (but --output) or contacted. What it would have launched becomes the config.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the YAML, or write it; notes about what was not run go to stderr.

    Raises:
        ConfigError: the script is not understood, starts no training, or its flags are wrong.
    """
    options = parser().parse_args(arguments)

    from fuligo.cli.console import show_warning
    from fuligo.importer import import_script
    from fuligo.importer.config_file import imported_config

    script = import_script(
        options.script,
        options.argument,
        environment=os.environ,
        given=_variables(options.env),
        root=options.root,
        has_nvlink=options.nvlink,
    )
    imported = imported_config(script)
    for note in [*script.notes, *imported.warnings]:
        show_warning(note)
    text = f"# Imported from {options.script.name}: the flags and the environment of its training job.\n{imported.yaml()}"
    if options.output is None:
        print(text, end="")
    else:
        _write(options.output, text)
    return 0


def parser() -> argparse.ArgumentParser:
    """Of the command's options."""
    made = argparse.ArgumentParser("fuligo import-script", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("script", type=Path, help="bash script that starts train.py, alone or by `ray job submit`")
    made.add_argument("argument", nargs="*", help="the script's own arguments: $1, $2, ...")
    made.add_argument("--output", type=Path, metavar="FILE", help="write the config there instead of printing it; a new file")
    made.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable that the script may see; repeatable")
    made.add_argument("--root", type=Path, metavar="DIR", help="folder whose files the script may read (default: the script's own)")
    made.add_argument("--nvlink", action=argparse.BooleanOptionalAction, default=True, help="what a script that asks nvidia-smi is told")
    return made


def _variables(given: Sequence[str]) -> dict[str, str]:
    for entry in given:
        if not entry.partition("=")[0].isidentifier() or "=" not in entry:
            raise ConfigError(f"--env {entry}: must be NAME=VALUE")
    return dict(entry.split("=", 1) for entry in given)


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"--output {file} exists already; choose a new file") from None
    except OSError as error:
        raise ConfigError(f"--output {file} cannot be written: {error.strerror}") from None
