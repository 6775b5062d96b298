"""Store of checkpoints: `iter_0000020` after 20 complete rollouts, and a tracker file with the newest iteration.

Saving a checkpoint is atomic: it is written under a temporary name, flushed and renamed; then the tracker is replaced and old checkpoints
are deleted. A crash between any two of these steps leaves a valid newest checkpoint, and the next start cleans up.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fuligo.checkpoint.location import iteration_name, iterations, replaced_iterations, replaced_name
from fuligo.checkpoint.state import RunState
from fuligo.errors import CheckpointError, CheckpointWriteError, ConfigError, FuligoError
from fuligo.formats.checkpoint_files import LOCK, TRACKER, UNFINISHED
from fuligo.formats.disk import free_space, is_foreign_link, replace_text, sync, sync_tree, try_lock, write_manifest

logger = logging.getLogger(__name__)


@contextmanager
def saving_to(directory: Path) -> Iterator[None]:
    """Lock `directory` (created if missing) inside the block, because runs that save to the same directory would delete each other's files.

    Raises:
        ConfigError: another run saves to the directory, or it contains links of another user.
        CheckpointError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        foreign = [entry.name for entry in directory.iterdir() if is_foreign_link(entry)]
        lock = None if foreign else try_lock(directory / LOCK)
    except OSError as error:
        raise _unwritable(directory, error) from None
    if foreign:
        raise ConfigError(
            f"cannot save to {directory}: it has links of another user ({', '.join(foreign[:3])}), through which this run would "
            "overwrite files; remove the links, or use another --save"
        )
    if lock is None:
        raise ConfigError(
            f"cannot save to {directory}: a running job saves its checkpoints there; wait for it to end, or use another --save"
        )
    try:
        yield
    finally:
        os.close(lock)


class CheckpointStore:
    """Directory of checkpoints, to which only one run may save (see `saving_to`); saving deletes old checkpoints."""

    def __init__(self, directory: Path, *, keep: int | None = None, used: frozenset[int] = frozenset()) -> None:
        """Create the directory if missing, and clean up after a crash.

        Args:
            keep: number of newest checkpoints to keep; None: keep all.
            used: iterations that are never deleted, because flags of the run refer to them.
        """
        self.directory = directory
        self.newest: int | None = None
        """Newest iteration that this object has saved."""
        self._keep = keep
        self._used = used
        self.clear_up()

    def clear_up(self) -> None:
        """Create the directory if missing, and finish or undo an interrupted save. Raises CheckpointError if it cannot be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
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
        except OSError as error:
            raise _unwritable(self.directory, error) from None

    async def save(self, iteration: int, write: Callable[[Path], Awaitable[None]], state: RunState) -> Path:
        """Save `state` and the files that `write` puts into the given directory as checkpoint `iteration`; return the checkpoint's path.

        Raises CheckpointWriteError if writing failed, for example because the disk is full; earlier checkpoints are untouched.
        """
        return await (await self.begin(iteration, write, lambda: asyncio.sleep(0), state))

    async def begin(
        self, iteration: int, write: Callable[[Path], Awaitable[None]], wait: Callable[[], Awaitable[None]], state: RunState
    ) -> asyncio.Task[Path]:
        """Begin a save that continues in the background; return its task, whose result is the path. Only one save may run at a time.

        Args:
            write: function that begins to write the trainer's part to a directory; when it returns, training may continue.
            wait: function that returns when the trainer's part is on disk.

        Raises:
            CheckpointWriteError: the save could not begin, or (raised by the task) be completed; earlier checkpoints are untouched.
        """
        unfinished = self.directory / f"{UNFINISHED}{iteration_name(iteration)}"
        try:
            async with self._attempt(iteration):
                unfinished.mkdir()
                await write(unfinished)
                await asyncio.to_thread(state.write, unfinished)  # before the run goes on and changes its samples
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        rest = asyncio.create_task(self._end(iteration, unfinished, wait))
        rest.add_done_callback(lambda _: shutil.rmtree(unfinished, ignore_errors=True))  # also if the task was canceled before it started
        return rest

    async def _end(self, iteration: int, unfinished: Path, wait: Callable[[], Awaitable[None]]) -> Path:
        async with self._attempt(iteration):
            await wait()
            await _uninterrupted(asyncio.to_thread(self._finish, unfinished, iteration))
        logger.info("saved %s", self.directory / iteration_name(iteration))
        return self.directory / iteration_name(iteration)

    @asynccontextmanager
    async def _attempt(self, iteration: int) -> AsyncIterator[None]:
        """Convert errors inside the block to `CheckpointWriteError`, except `FuligoError`s other than `CheckpointError`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FuligoError) and not isinstance(error, CheckpointError):
                raise
            earlier = iterations(self.directory)
            kept = f"{iteration_name(earlier[-1])} is intact" if earlier else "no earlier checkpoint exists"
            raise CheckpointWriteError(
                f"cannot write checkpoint {iteration_name(iteration)} to {self.directory}: {error} "
                f"({free_space(self.directory)}; {kept}); free some space or use another directory with --save, then resume"
            ) from error

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
        self.newest = iteration
        shutil.rmtree(replaced, ignore_errors=True)
        self._remove_old(iteration)

    def _remove_old(self, newest: int) -> None:
        """Delete checkpoints up to `newest`, except the newest `keep` and those in use.

        Later checkpoints, of a branch that the run left by resuming from an earlier one, are kept.
        """
        if self._keep is None:
            return
        for iteration in [known for known in iterations(self.directory) if known <= newest][: -self._keep]:
            if iteration in self._used:
                continue
            remove = self.directory / f"{UNFINISHED}{iteration_name(iteration)}"
            (self.directory / iteration_name(iteration)).rename(remove)
            shutil.rmtree(remove, ignore_errors=True)


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write checkpoints to {directory}: {error.strerror}; use another directory with --save")


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to the end even if canceled, because its thread cannot be stopped and its files must not be deleted while it runs."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
