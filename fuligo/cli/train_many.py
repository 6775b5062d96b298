"""`fuligo train-many`: several LoRA runs at once over one trainer and one engine."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from fuligo.cli.train import prepare
from fuligo.config import Config
from fuligo.config.command_line import CONFIG_OPTION, Parsed, parse
from fuligo.config.help import asked_for_help
from fuligo.config.many import problems_of_many
from fuligo.errors import ConfigError
from fuligo.limits import collector_paused
from fuligo.models.hub import located

USAGE = """\
usage: fuligo train-many A.yaml B.yaml ... [--flag value ...]

Trains several LoRA adapters at once. Each file is the config of one run, as for `fuligo train --config`, with a run directory, data and a
reward of its own. All runs share one copy of the base weights in one torch trainer, and one embedded engine. Flags after the files hold for
all runs. A run that fails ends alone; the exit code is then 1.

More: docs/lora.md, fuligo train --help
"""
EMPTY: Mapping[str, Sequence[str]] = {}


def main(arguments: Sequence[str]) -> int:
    """Check all runs, then run them.

    Raises:
        ConfigError: a run cannot start, or the runs do not fit together; names all problems found.
        RunsFailedError: runs failed.
    """
    if asked_for_help(arguments) is not None:
        print(USAGE, end="")
        return 0
    files = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    given = arguments[len(files) :]
    if any(argument.partition("=")[0] == CONFIG_OPTION for argument in given):
        raise ConfigError(f"{CONFIG_OPTION}: fuligo train-many takes config files without an option: fuligo train-many A.yaml B.yaml")
    with collector_paused():
        parsed = _read(files, given)
        checked = prepare_many({name: each.config for name, each in parsed.items()}, {name: each.warnings for name, each in parsed.items()})
    from fuligo.job import run_many_to_end

    run_many_to_end(checked)
    return 0


def _read(files: Sequence[str], flags: Sequence[str]) -> dict[str, Parsed]:
    """Read the configs with the flags, by the names of their files, which are whole paths where two files have one name.

    Raises:
        ConfigError: a file or a flag is wrong.
    """
    stems = Counter(Path(file).stem for file in files)
    if twice := [file for file, number in Counter(files).items() if number > 1]:
        raise ConfigError(f"{twice[0]} is given twice; each run needs a config of its own")
    names = [Path(file).stem if stems[Path(file).stem] == 1 else file for file in files]
    return {name: parse([CONFIG_OPTION, file, *flags]) for name, file in zip(names, files, strict=True)}


def prepare_many(configs: Mapping[str, Config], warnings: Mapping[str, Sequence[str]] = EMPTY) -> dict[str, Config]:
    """Check that runs can share a trainer and an engine, and each as `fuligo train` does; return the configs to run.

    Args:
        configs: by the name of the run
        warnings: about their flags, likewise

    Raises:
        ConfigError: a run cannot start, or the runs do not fit together; names all problems found.
    """
    started = datetime.now()
    # Before each is checked by itself, which may take its time, and with the values that were chosen then.
    _require_fit({name: located(config) for name, config in configs.items()}, started)
    prepared: dict[str, Config] = {}
    problems: list[str] = []
    for name, config in configs.items():
        try:
            prepared[name] = prepare(config, warnings.get(name, ()))
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    _require_fit(prepared, started)
    return prepared


def _require_fit(configs: Mapping[str, Config], started: datetime) -> None:
    problems = problems_of_many(configs, started)
    if problems:
        raise ConfigError(*problems)
