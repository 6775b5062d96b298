"""`fuligo train-many`: several LoRA runs at once on one trainer and the same engines."""

import re
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
from fuligo.quantities import count

RESUME = "--resume"
USAGE = f"""\
usage: fuligo train-many A.yaml B.yaml ... [{RESUME}] [--flag value ...]

Trains several LoRA adapters at once. Each file is the config of one run, as for `fuligo train --config`, with its own run
directory, data and reward. All runs share one copy of the base weights in one torch trainer, and one copy in the engines. Flags after the
files apply to all runs. If a run fails, the others continue; the exit code is then 1.

{RESUME} continues each run from its own checkpoints, starts those that have none, and skips those that are complete.

More: docs/lora.md, fuligo train --help
"""
NO_WARNINGS: Mapping[str, Sequence[str]] = {}


def main(arguments: Sequence[str]) -> int:
    """Check all runs, then run them."""
    if asked_for_help(arguments) is not None:
        print(USAGE, end="")
        return 0
    resumes, arguments = RESUME in arguments, [argument for argument in arguments if argument != RESUME]
    files = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    with collector_paused():
        parsed = _read(files, arguments[len(files) :])
        warnings = {name: each.warnings for name, each in parsed.items()}
        configs = prepare_many({name: each.config for name, each in parsed.items()}, warnings, resumes=resumes)
    if configs:
        from fuligo.job import run_many_to_end

        run_many_to_end(configs, resume=resumes)
    return 0


def _read(files: Sequence[str], flags: Sequence[str]) -> dict[str, Parsed]:
    """Read the config files with the flags; return them by file name without suffix, or by path if two of these names are equal.

    Raises ConfigError if a file is given twice, or a config is not valid.
    """
    if any(flag.partition("=")[0] == CONFIG_OPTION for flag in flags):
        raise ConfigError(f"{CONFIG_OPTION}: fuligo train-many takes config files without an option: fuligo train-many A.yaml B.yaml")
    if twice := [file for file, number in Counter(files).items() if number > 1]:
        raise ConfigError(f"{twice[0]} is given twice; each run needs its own config")
    stems = [Path(file).stem for file in files]
    names = stems if len(set(stems)) == len(stems) else files
    return {name: parse([CONFIG_OPTION, file, *flags]) for name, file in zip(names, files, strict=True)}


def prepare_many(
    configs: Mapping[str, Config], warnings: Mapping[str, Sequence[str]] = NO_WARNINGS, *, resumes: bool = False
) -> dict[str, Config]:
    """Check that runs can share trainer and engines, check each as `fuligo train` does, and return the configs to run.

    Args:
        configs: by the name of the run
        warnings: about their flags, by the name of the run
        resumes: continue each run from its own checkpoints; complete ones are left out
    """
    if len(configs) < 2:
        raise ConfigError("fuligo train-many takes the configs of several runs, A.yaml B.yaml ...; use fuligo train for one")
    started = datetime.now()
    # Checked before the runs' own checks, which may take a long time, and again with the values that these choose.
    given = {name: located(config) for name, config in configs.items()}
    if not resumes:
        given = _with_directories(given, started)
    problems = problems_of_many(given, started)
    if problems:
        raise ConfigError(*problems)
    from fuligo.job.origin import Origin
    from fuligo.observability.run_directory import require_usable

    prepared: dict[str, Config] = {}
    shown: set[str] = set()
    to_run = _resumed(given) if resumes else given
    for name, config in to_run.items():
        try:
            sharing = [other for other in to_run.values() if other is not config]
            prepared[name] = prepare(config, warnings.get(name, ()), sharing=sharing, shown=shown)
            # Before the shared trainer and engines start, check that the run can use its directory.
            directory = prepared[name].run_directory(started)
            require_usable(directory, resume=resumes or Origin.find(prepared[name]).may_cut_back(prepared[name], directory))
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if not problems and prepared:
        problems = problems_of_many(prepared, started)
    if problems:
        raise ConfigError(*problems)
    return prepared


def _with_directories(configs: Mapping[str, Config], started: datetime) -> dict[str, Config]:
    """Return the configs, each with a run directory; the default, named after the start time, would differ in the run's own process."""
    return {
        name: _changed(config, "observability", run_dir=str(config.run_directory(started)) + re.sub(r"[^\w.]+", "-", f"-{name}"))
        if config.observability.run_dir is None and config.observability.name is None
        else config
        for name, config in configs.items()
    }


def _resumed(configs: Mapping[str, Config]) -> dict[str, Config]:
    """Return the configs of the runs that are not complete, each with --load of its own checkpoints, or its given one if it has none.

    Raises ConfigError if a run has neither --run-dir nor --name, by which its directory is found, and FuligoError if the data that
    --num-epoch counts cannot be read.
    """
    from fuligo.checkpoint.location import newest_iteration
    from fuligo.cli.console import show_choice
    from fuligo.job.origin import save_directory

    left: dict[str, Config] = {}
    for name, config in configs.items():
        if config.observability.run_dir is None and config.observability.name is None:
            raise ConfigError(f"{name}: {RESUME} cannot find a run directory that is named after its start time; name it with --run-dir")
        directory = config.run_directory(datetime.now())
        saved = save_directory(config, directory)
        loaded = config.checkpoint.load
        # With another --load, --ckpt-step belongs to the weights that the run began with.
        step = config.checkpoint.ckpt_step if loaded is None or Path(loaded).resolve() == saved.resolve() else None
        iteration = step if step is not None else newest_iteration(saved) if saved.is_dir() else None
        num_done = max(iteration or 0, 0 if step is not None else _num_unsaved(config, directory))
        if num_done > 0 and num_done >= (num_rollout := _num_rollout(config)):
            show_choice(f"{name}: skipped, because it is complete ({num_done} of {count(num_rollout, 'rollout')})")
        elif iteration is not None:
            left[name] = _changed(config, "checkpoint", load=str(saved), ckpt_step=step)
        else:
            left[name] = config if config.checkpoint.load is not None else _changed(config, "checkpoint", load=str(saved))
    return left


def _num_unsaved(config: Config, directory: Path) -> int:
    """Return the number of rollouts that a run has recorded; 0 if a checkpoint is due after the newest one, or its evaluation is missing.

    If a checkpoint is due, it tells how many are complete; if it or the evaluation is missing, the run was interrupted.
    """
    from fuligo.observability.jsonl import read_json_lines

    metrics, evaluations = directory / "metrics.jsonl", directory / "eval" / "metrics.jsonl"
    if config.checkpoint.save_last or not metrics.exists():
        return 0
    num_done = max((record["step"] + 1 for record in read_json_lines(metrics)), default=0)
    interval = config.checkpoint.save_interval
    if interval is not None and num_done % interval == 0:
        return 0
    if config.has_eval:
        evaluated = {record["num_rollouts"] for record in read_json_lines(evaluations)} if evaluations.exists() else set[int]()
        return num_done if num_done in evaluated else 0
    return num_done


def _num_rollout(config: Config) -> int:
    """Return the number of rollouts of a run; opens its data to resolve --num-epoch."""
    if config.data.num_rollout is not None:
        return config.data.num_rollout
    from fuligo.job.rollouts import RunData

    return RunData.open(config).num_rollout


def _changed(config: Config, group: str, **values: object) -> Config:
    """Return the config with other values of flags in a group."""
    return config.model_copy(update={group: getattr(config, group).model_copy(update=values)})
