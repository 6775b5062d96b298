"""Watch over a run: background tasks whose failure ends a part of it, functions that block its event loop, and signals."""

import asyncio
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
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
_CHECKS_PER_LIMIT = 100
"""Number of checks per `limit_s`. With 10, a function that takes 15% of the time would by chance be reported within an hour."""
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_EVENT_LOOP = f"{Path(asyncio.__file__).parent}{os.sep}"
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
    """Return the location of the user's function that the event loop or fuligo called in the thread; None if they called none."""
    called: traceback.FrameSummary | None = None
    for frame, line in traceback.walk_stack(sys._current_frames()[thread]):  # the innermost first
        place = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        if place.filename.startswith((_OURS, _EVENT_LOOP)):
            return None if called is None or called.filename.startswith((*_INSTALLED, "<frozen")) else called
        called = place
    return None


class Termination:
    """Request to end a run by a signal, and whether the run saves first."""

    def __init__(self, save_within_s: float | None = None, *, saves_on_interrupt: bool = False) -> None:
        """Create a termination that is not requested yet.

        Args:
            save_within_s: seconds after SIGTERM for the step in progress and its checkpoint; None: SIGTERM ends the run at once
            saves_on_interrupt: the first Ctrl-C ends the run after the step in progress and its checkpoint; False: at once
        """
        self._save_within_s = save_within_s
        self._saves_on_interrupt = saves_on_interrupt
        self._has_unsaved: Callable[[], bool] = lambda: False
        self._deadline: asyncio.TimerHandle | None = None
        self.requested = False
        self.end_of_rollouts = asyncio.Event()
        """Set when no further rollout may be sampled or trained on."""

    def request(self, run: asyncio.Task[object]) -> None:
        """End the run on SIGTERM: at once or, if it may save, after a checkpoint; further signals do not shorten the time for it."""
        self.requested = True
        if self._save_within_s is None or not self._has_unsaved():
            run.cancel()
            return
        if self._deadline is not None:
            return
        logger.warning("received SIGTERM; saving the last complete rollout within %g s", self._save_within_s)
        self.end_of_rollouts.set()
        self._deadline = asyncio.get_running_loop().call_later(self._save_within_s, self._give_up, run)

    def interrupt(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Let the run save and end on the first Ctrl-C; return False if it must end at once instead. May be called in a signal handler."""
        if self.requested or not self._saves_on_interrupt or not self._has_unsaved():
            return False
        self.requested = True
        loop.call_soon_threadsafe(self._end_after_interrupt)
        return True

    @contextmanager
    def may_save(self, has_unsaved: Callable[[], bool]) -> Iterator[None]:
        """Let a termination that is requested during this block wait for a checkpoint if there is anything to save then."""
        self._has_unsaved = has_unsaved
        try:
            yield
        finally:
            self._has_unsaved = lambda: False

    def _end_after_interrupt(self) -> None:
        logger.warning(
            "received Ctrl-C; saving the last complete rollout, after the training step in progress, if any; press Ctrl-C again to end at "
            "once without saving"
        )
        self.end_of_rollouts.set()

    def _give_up(self, run: asyncio.Task[object]) -> None:
        if self._has_unsaved():
            logger.warning("no checkpoint within %g s of SIGTERM (--save-on-sigterm); ending without it", self._save_within_s)
        run.cancel()


@contextmanager
def signals_passed_to(termination: Termination, run: asyncio.Task[Any]) -> Iterator[None]:
    """Pass SIGTERM, and the first Ctrl-C during the block, to `termination`. No-op outside the main thread, which alone gets signals.

    A Ctrl-C that `termination` does not accept goes to the previous handler, that of `asyncio.run`: it cancels the main task and, the next
    time, raises KeyboardInterrupt. An ignored Ctrl-C, as in a background job, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGTERM, termination.request, run)
    if not callable(before):
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not termination.interrupt(loop):
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
