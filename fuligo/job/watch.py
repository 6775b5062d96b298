"""Watch over a run: background tasks whose failure ends a part of it, functions that block its event loop, and SIGTERM."""

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any


@asynccontextmanager
async def while_watching(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `watch`, which never ends by itself, during the block. If it raises, the block is canceled and its error is raised."""
    watching = asyncio.create_task(watch)
    try:
        async with failing_with(watching):
            yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def failing_with(task: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Cancel the block if the task fails, and raise the task's error. The task may outlast the block."""
    block = asyncio.current_task()
    assert block is not None
    is_over = False

    def cancel(done: asyncio.Task[Any]) -> None:
        if not is_over and _has_failed(done):
            block.cancel()

    task.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if task.done() and _has_failed(task) and block.uncancel() == 0:
            task.result()
        raise
    finally:
        is_over = True


def _has_failed(done: asyncio.Task[Any]) -> bool:
    return not done.cancelled() and done.exception() is not None


logger = logging.getLogger(__name__)

LIMIT_S = 30.0
"""Seconds after which a blocked event loop is reported; equal to the default of --rm-timeout-s."""
_CHECKS_PER_LIMIT = 10
_OURS = str(Path(__file__).parents[1])
_EVENT_LOOP = str(Path(asyncio.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@contextmanager
def stalls_reported(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Warn once about each user function that blocks the running event loop within the block: for longer than `limit_s` at a time or, in
    several short calls, for at least half of the last `limit_s` seconds.
    """
    loop, stop, period_s = asyncio.get_running_loop(), threading.Event(), limit_s / _CHECKS_PER_LIMIT
    last_beat_s = 0.0

    def beat() -> None:
        nonlocal last_beat_s
        last_beat_s = time.monotonic()
        if not stop.is_set():
            loop.call_later(period_s, beat)

    def watch(loop_thread: int) -> None:
        seen: deque[tuple[str, str] | None] = deque(maxlen=_CHECKS_PER_LIMIT)
        reported: set[tuple[str, str]] = set()
        while not stop.wait(period_s):
            culprit = _user_frame(loop_thread)
            name = None if culprit is None else (culprit.filename, culprit.name)
            seen.append(name)
            if culprit is None or name is None or name in reported:
                continue
            if time.monotonic() - last_beat_s > limit_s:
                share = "for"
            elif seen.count(name) >= _CHECKS_PER_LIMIT / 2:
                share = "for at least half of"
            else:
                continue
            reported.add(name)
            logger.warning(
                "event loop blocked %s %g s in %s (%s:%s); await slow work in async functions, write a reward as a plain function "
                "(it runs in a thread), and let environments run isolated (no --environment-isolation none, no `isolated = False`)",
                share,
                limit_s,
                culprit.name,
                culprit.filename,
                culprit.lineno,
            )

    beat()
    watching = threading.Thread(target=watch, args=(threading.get_ident(),), name="stalls", daemon=True)
    watching.start()
    try:
        yield
    finally:
        stop.set()
        watching.join()


def _user_frame(thread: int) -> traceback.FrameSummary | None:
    """Return the frame of the user's function that the event loop or fuligo called in the thread; None if none of the user's code runs."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    ours = [place for place, frame in enumerate(stack) if frame.filename.startswith((_OURS, _EVENT_LOOP))]
    beyond = stack[ours[-1] + 1 :] if ours else []
    return beyond[0] if beyond and not beyond[0].filename.startswith((*_INSTALLED, "<frozen")) else None


class Termination:
    """Request to end a run, and the time that it may take to save first."""

    def __init__(self, save_within_s: float | None = None) -> None:
        """Create a termination that is not requested yet.

        Args:
            save_within_s: seconds for the step in progress and its checkpoint; None ends the run at once
        """
        self._save_within_s = save_within_s
        self._can_save = False
        self.requested = False
        self.end_of_rollouts = asyncio.Event()
        """Set when no further rollout may be sampled or trained on."""

    def request(self, run: asyncio.Task[object]) -> None:
        """End the run at once or, if it may save, after a checkpoint; further requests do not shorten the time for it."""
        first, self.requested = not self.requested, True
        if not self._can_save or self._save_within_s is None:
            run.cancel()
            return
        if not first:
            return
        logger.warning("received SIGTERM; saving the last complete rollout within %g s", self._save_within_s)
        self.end_of_rollouts.set()
        asyncio.get_running_loop().call_later(self._save_within_s, self._give_up, run)

    @contextmanager
    def may_save(self) -> Iterator[None]:
        """Let a termination that is requested during this block wait for a checkpoint."""
        self._can_save = True
        try:
            yield
        finally:
            self._can_save = False

    def _give_up(self, run: asyncio.Task[object]) -> None:
        if self._can_save:
            logger.warning("no checkpoint within %g s of SIGTERM (--save-on-sigterm); ending without it", self._save_within_s)
        run.cancel()
