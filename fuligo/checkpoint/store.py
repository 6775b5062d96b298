"""A directory of checkpoints: `iter_0000020` after 20 complete rollouts, beside the tracker that names the newest.

A checkpoint appears whole or not at all. It is written under another name, brought to disk, renamed; then the tracker is
replaced; then old ones go. A crash between any two of these leaves a valid newest checkpoint, and the next start clears up.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fuligo.checkpoint.location import (
    Checkpoint,
    find_iteration,
    iteration_name,
    iterations,
    newest_iteration,
    replaced_iterations,
    replaced_name,
)
from fuligo.checkpoint.state import RunState
from fuligo.errors import CheckpointError, CheckpointWriteError, FuligoError
from fuligo.formats.checkpoint_files import TRACKER, UNFINISHED
from fuligo.formats.disk import room
from fuligo.formats.durable import replace_text, sync, sync_tree
from fuligo.formats.file_manifest import write_manifest

logger = logging.getLogger(__name__)


class CheckpointStore:
    """Saves checkpoints to one directory, keeps the newest ones. One process writes to it."""

    def __init__(self, directory: Path, *, keep: int | None = None) -> None:
        """
        Args:
            directory: made where it is missing; what a crash left unfinished in it is cleared.
            keep: newest checkpoints that stay; None is all.

        Raises:
            CheckpointError: it cannot be written to.
        """
        self.directory = directory
        self._keep = keep
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._clear_up()
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {directory}: {error.strerror}; give another place with --save"
            ) from None

    async def save(self, iteration: int, write: Callable[[Path], Awaitable[None]], state: RunState) -> Path:
        """Save what `write` puts into the directory it is given, and `state`.

        Args:
            iteration: complete rollouts.
            write: the trainer's part; everything is on disk when it returns.
            state: the driver's part.

        Raises:
            CheckpointWriteError: it could not be written (a full disk, for instance); earlier checkpoints are untouched.
        """
        return await (await self.begin(iteration, write, _nothing, state))

    async def begin(
        self, iteration: int, write: Callable[[Path], Awaitable[None]], wait: Callable[[], Awaitable[None]], state: RunState
    ) -> asyncio.Task[Path]:
        """Begin a save that goes on when this returns. One at a time.

        Args:
            iteration: complete rollouts.
            write: begins the trainer's part; the run may go on when it returns.
            wait: returns when that is on disk.
            state: the driver's part.

        Returns:
            The rest of the save; its result is the checkpoint, which appears whole or, where it fails, not at all.

        Raises:
            CheckpointWriteError: it could not be begun; earlier checkpoints are untouched.
        """
        unfinished = self.directory / f"{UNFINISHED}{iteration_name(iteration)}"
        try:
            async with self._attempt(iteration):
                unfinished.mkdir()
                await write(unfinished)
                await asyncio.to_thread(state.write, unfinished)  # now: its samples may change while the rest is written
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        rest = asyncio.create_task(self._end(iteration, unfinished, wait))
        rest.add_done_callback(lambda _: shutil.rmtree(unfinished, ignore_errors=True))  # also of one cancelled before it ran
        return rest

    async def _end(self, iteration: int, unfinished: Path, wait: Callable[[], Awaitable[None]]) -> Path:
        async with self._attempt(iteration):
            await wait()
            await _to_the_end(asyncio.to_thread(self._finish, unfinished, iteration))
        logger.info("saved %s", self.directory / iteration_name(iteration))
        return self.directory / iteration_name(iteration)

    @asynccontextmanager
    async def _attempt(self, iteration: int) -> AsyncIterator[None]:
        """Errors of the block say what became of the checkpoint; a trainer that failed otherwise speaks for itself."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FuligoError) and not isinstance(error, CheckpointError):
                raise
            raise CheckpointWriteError(self._failure(iteration, error)) from error

    def latest(self) -> Checkpoint | None:
        """The checkpoint that the tracker names.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        iteration = newest_iteration(self.directory)
        return None if iteration is None else find_iteration(self.directory, iteration)

    def _finish(self, unfinished: Path, iteration: int) -> None:
        write_manifest(unfinished)
        sync_tree(unfinished)
        final = self.directory / iteration_name(iteration)
        replaced = self.directory / replaced_name(iteration)
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        sync(self.directory)
        replace_text(self.directory / TRACKER, str(iteration))
        shutil.rmtree(replaced, ignore_errors=True)
        self._remove_old(iteration)

    def _remove_old(self, newest: int) -> None:
        """Later iterations, of a run that was resumed from an earlier one, stay until they are reached again."""
        if self._keep is None:
            return
        for iteration in [known for known in iterations(self.directory) if known <= newest][: -self._keep]:
            remove = self.directory / f"{UNFINISHED}{iteration_name(iteration)}"
            (self.directory / iteration_name(iteration)).rename(remove)
            shutil.rmtree(remove, ignore_errors=True)

    def _clear_up(self) -> None:
        """Undo what a crash left half done."""
        for iteration in replaced_iterations(self.directory):
            replaced, final = self.directory / replaced_name(iteration), self.directory / iteration_name(iteration)
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)
        for unfinished in self.directory.glob(f"{UNFINISHED}*"):
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            else:
                unfinished.unlink()

    def _failure(self, iteration: int, error: Exception) -> str:
        earlier = iterations(self.directory)
        kept = f"{iteration_name(earlier[-1])} is intact" if earlier else "there is no earlier one"
        return (
            f"the checkpoint {iteration_name(iteration)} could not be written to {self.directory}: {error} "
            f"({room(self.directory)}; {kept}); make room or give another place with --save, then resume"
        )


async def _nothing() -> None:
    """All is on disk already."""


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """A thread cannot be stopped: who is cancelled meanwhile waits for it, lest its files be removed under its hands."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
