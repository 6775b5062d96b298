"""Background tasks whose failure ends a part of a run."""

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any


@asynccontextmanager
async def while_watching(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `watch`, which never ends by itself, during the block. Its error cancels the block and is raised instead."""
    watching = asyncio.create_task(watch)
    try:
        async with failing_with(watching):
            yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def failing_with(task: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Cancel the block if the task, which may outlast it, fails; the error of the task is raised instead."""
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
"""Equal to the default deadline of a reward."""
_CHECKS_PER_LIMIT = 10
_OURS = str(Path(__file__).parents[1])
_EVENT_LOOP = str(Path(asyncio.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@contextmanager
def stalls_reported(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Warn once about each user function that blocks the running event loop for longer than `limit_s` within the block."""
    loop, stop, period_s = asyncio.get_running_loop(), threading.Event(), limit_s / _CHECKS_PER_LIMIT
    last_beat_s = 0.0

    def beat() -> None:
        nonlocal last_beat_s
        last_beat_s = time.monotonic()
        if not stop.is_set():
            loop.call_later(period_s, beat)

    def watch(loop_thread: int) -> None:
        reported_s = 0.0
        while not stop.wait(period_s):
            if time.monotonic() - last_beat_s <= limit_s or last_beat_s == reported_s:
                continue
            reported_s = last_beat_s
            culprit = _user_frame(loop_thread)
            if culprit is not None:
                logger.warning(
                    "event loop blocked for %g s in %s (%s:%s); an async function must await slow work, or be a plain function, which runs "
                    "in a thread if it is a reward",
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
    """Return the first frame of the thread beyond the event loop and fuligo, unless it belongs to an installed package."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    ours = [place for place, frame in enumerate(stack) if frame.filename.startswith((_OURS, _EVENT_LOOP))]
    beyond = stack[ours[-1] + 1 :] if ours else []
    return beyond[0] if beyond and not beyond[0].filename.startswith((*_INSTALLED, "<frozen")) else None
