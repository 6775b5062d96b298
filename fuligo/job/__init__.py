"""Assembly and execution of a run: the only package that knows every part."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fuligo.config import Config
from fuligo.config.launcher import world_size
from fuligo.errors import ConfigError
from fuligo.job.watch import Termination, signals_passed_to, stalls_reported
from fuligo.limits import collector_paused

if TYPE_CHECKING:
    from fuligo.job.evaluation import Evaluated
    from fuligo.job.lent import LentParts
    from fuligo.job.run import Outcome

T = TypeVar("T")


def run_job(config: Config) -> int:
    """Run `fuligo train` and return the exit code 0. Under torchrun, rank 0 drives the run and the other ranks follow it.

    Raises ConfigError under torchrun if --max-restarts is set, or the ranks of several hosts have no common key, and FuligoError if the run
    failed.
    """
    if world_size(os.environ) > 1 and _follow_unless_driver(config):
        return 0
    show_end(config, run_to_end(config).run_dir)
    return 0


def _follow_unless_driver(config: Config) -> bool:
    """Check what torchrun has set. If this process is not the driver, follow the run to its end and return True; else return False."""
    with collector_paused():
        from fuligo.trainer.ranks.torchrun import follow, torchrun_place

    place = torchrun_place()
    assert place is not None, "torchrun started several processes"
    place.read_key()  # reports a missing key before the engines start
    if config.checkpoint.max_restarts > 0:
        raise ConfigError(
            f"--max-restarts {config.checkpoint.max_restarts}: this run cannot replace ranks that torchrun started; remove it and "
            "give torchrun its own --max-restarts, or start without torchrun"
        )
    if place.rank > 0:
        follow(place)
    return place.rank > 0


def show_end(config: Config, run_dir: Path) -> None:
    """Print where a complete run wrote its files, and say so if it saved no checkpoint."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"run directory: {run_dir}", markup=False)
    if config.trains and not config.saves:
        console.print("no checkpoint saved: --no-save-last without a --save-interval of at most --num-rollout")


def run_to_end(config: Config, lent: LentParts | None = None) -> Outcome:
    """Run a configuration to its end and return the outcome. Raises KeyboardInterrupt if a signal ended the run.

    Ctrl-C and SIGTERM end it early: engines and ranks are stopped, and all records are kept. The first Ctrl-C saves a checkpoint first,
    unless --no-save-last is set; SIGTERM does so with --save-on-sigterm.
    """
    with collector_paused():
        from fuligo.job.run import run_config

    _keep_private(config)
    termination = Termination(config.checkpoint.save_on_sigterm, saves_on_interrupt=config.checkpoint.save_last)
    return asyncio.run(_run_until_terminated(run_config(config, termination, lent), termination))


async def run_in_loop(config: Config) -> Outcome:
    """Run a configuration to its end in the running event loop and return the outcome; canceling it ends the run at once.

    Signals are left to the caller. Raises FuligoError if the run failed.
    """
    from fuligo.job.run import run_config

    _keep_private(config)
    return await run_config(config, Termination())


def run_many_to_end(configs: Mapping[str, Config], *, resume: bool = False) -> list[Path]:
    """Run checked configurations concurrently, each in its own process, on one trainer and the same engines; return the run directories.

    Args:
        configs: configurations by the name of the run; each sets its run directory
        resume: runs without a checkpoint start over and replace the steps that they recorded

    Raises:
        RunsFailedError: some runs failed; the others ran to their end
        EngineError: an engine did not start, or died
        KeyboardInterrupt: a signal ended the runs
    """
    with collector_paused():
        from fuligo.job.many import run_many

    started = datetime.now()
    directories = [config.run_directory(started) for config in configs.values()]
    if not configs:
        return []
    _keep_private(next(iter(configs.values())))
    first = directories[0].resolve()  # `.` has no name
    logs = first.with_name(f"{first.name}.engines")  # each run directory belongs to the process of its run
    if any(config.needs_engine for config in configs.values()):
        logs.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(run_many(configs, logs, resume=resume))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return directories


def evaluate(config: Config, run_dir: Path) -> Evaluated:
    """Run `fuligo eval` and return its result. Ctrl-C and SIGTERM end it at once."""
    from fuligo.job.evaluation import evaluate_config

    _keep_private(config)
    return asyncio.run(_run_until_terminated(evaluate_config(config, run_dir), Termination()))


def _keep_private(config: Config) -> None:
    """Make new files of this process and its children inaccessible to other users, unless --shared-outputs is set."""
    if not config.observability.shared_outputs:
        os.umask(os.umask(0o077) | 0o077)


async def _run_until_terminated(work: Coroutine[Any, Any, T], termination: Termination) -> T:
    task = asyncio.ensure_future(work)
    try:
        with signals_passed_to(termination, task), stalls_reported():
            return await task
    except asyncio.CancelledError:
        if termination.requested:
            raise KeyboardInterrupt from None
        raise
