"""Background tasks whose failure ends a part of a run."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
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
