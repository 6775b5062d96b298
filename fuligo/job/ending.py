"""End of a run before its last rollout: what a failed run still saves, and the command that resumes it."""

import asyncio
import logging
import shlex
import sys

from fuligo.checkpoint.location import newest_iteration
from fuligo.config import Config
from fuligo.config.launcher import COMMAND
from fuligo.errors import RankError
from fuligo.job.engines import Engines
from fuligo.job.origin import save_directory
from fuligo.job.periodic import SaveCheckpoint
from fuligo.loop import Loop
from fuligo.observability.run_directory import RunDirectory
from fuligo.quantities import count

logger = logging.getLogger(__name__)


def report_interruption(config: Config, directory: RunDirectory, kind: type[BaseException] | None, *_: object) -> None:
    """Print how to resume after Ctrl-C or SIGTERM."""
    if kind is None or not issubclass(kind, asyncio.CancelledError):
        return
    iteration = newest_iteration(save_directory(config, directory.path))
    print(f"interrupted; run directory: {directory.path}", file=sys.stderr)
    if iteration is None:
        fix = "set --save-interval to save one" if config.checkpoint.save_interval is None else "set a lower --save-interval"
        print(f"the run has no checkpoint to resume from; {fix} before the run ends", file=sys.stderr)
    else:
        print(f"resume after {count(iteration, 'rollout')} with: {resume_command(config, directory)}", file=sys.stderr)


def resume_command(config: Config, directory: RunDirectory) -> str:
    """Return the command that resumes a run from its newest checkpoint, quoted for a shell."""
    save = save_directory(config, directory.path)
    arguments = ["--config", directory.config_file, "--run-dir", directory.path, "--load", save]
    return shlex.join([*COMMAND.get(), *map(str, arguments)])


async def save_after_failure(error: BaseException, loop: Loop, save: SaveCheckpoint, engines: Engines | None, resume: str) -> None:
    """Save the last complete rollout of a run that `error` ends, if nothing was trained since, and log the command that resumes it.

    Nothing is saved after a cancellation that was asked for, or after the loss of the trainer or of engines on its devices. A failed save
    is only logged, because `error` is raised next.
    """
    if loop.is_training or not save.has_unsaved or isinstance(error, RankError):
        return
    if isinstance(error, asyncio.CancelledError):
        lost = None if engines is None else engines.failure
        if lost is None or (engines is not None and engines.devices is not None):
            return  # the trainer would wait for the lost engines before it takes their devices
    try:
        await save.save_last()
    except Exception as failure:
        logger.warning("cannot save the last complete rollout after the failure that ends the run: %s", failure)
    else:
        logger.warning("the run failed and has saved its last complete rollout; resume with: %s", resume)
