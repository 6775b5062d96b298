"""`fuligo import-script`: the config file of a bash launch script."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fuligo.errors import ConfigError

_DESCRIPTION = """\
Turns a bash launch script into a config file. bash runs the script in a sandbox where python3, ray, ssh, pkill and the like
are stand-ins that record how they are called; the training job that the script starts becomes the config.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the config as YAML, or write it to --output; warnings go to stderr."""
    options = parser().parse_args(arguments)

    from fuligo.cli.console import show_warning
    from fuligo.importer.config_file import imported_config
    from fuligo.importer.run import import_script

    script = import_script(
        options.script,
        options.argument,
        environment=os.environ,
        given=_pairs("--env", "NAME=VALUE", options.env),
        root=options.root,
        maps={path: Path(folder) for path, folder in _pairs("--map", "PATH=DIR", options.map).items()},
        has_nvlink=options.nvlink,
        trusted=options.trust,
    )
    for note in script.notes:
        show_warning(note)
    imported = imported_config(script, slime_defaults=options.slime)
    for note in imported.warnings:
        show_warning(note)
    text = f"# Imported from {options.script.name}: the flags and the environment of its training job.\n{imported.yaml()}"
    if options.output is None:
        print(text, end="")
    else:
        try:
            with options.output.open("x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            raise ConfigError(f"--output {options.output} already exists; choose a new file") from None
        except OSError as error:
            raise ConfigError(f"cannot write --output {options.output}: {error.strerror}; choose another file") from None
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's options."""
    made = argparse.ArgumentParser("fuligo import-script", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("script", type=Path, help="bash script that starts train.py, directly or with `ray job submit`")
    made.add_argument("argument", nargs="*", help="arguments of the script: $1, $2, ...")
    made.add_argument("--output", type=Path, metavar="FILE", help="write the config to this new file instead of printing it")
    made.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable for the script; repeatable")
    made.add_argument("--root", type=Path, metavar="DIR", help="further folder that the script may read, besides its own")
    made.add_argument(
        "--map", action="append", default=[], metavar="PATH=DIR", help="mount DIR at PATH, a path that the script expects; repeatable"
    )
    made.add_argument(
        "--nvlink",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether nvidia-smi reports NVLink to the script (default: it does)",
    )
    made.add_argument(
        "--slime",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fill in slime's defaults and translate its flags (default: on)",
    )
    made.add_argument("--trust", action="store_true", help="run the script without a sandbox if none can be built")
    return made


def _pairs(option: str, form: str, entries: Sequence[str]) -> dict[str, str]:
    for entry in entries:
        name, equals, _ = entry.partition("=")
        if not equals or not name or (option == "--env" and not name.isidentifier()):
            raise ConfigError(f"{option} {entry}: must be {form}")
    return dict(entry.split("=", 1) for entry in entries)
