"""Something that is looked after while a run goes on, and whose failure ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def while_watching(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `watch` beside the block. An error of it cancels the block and is raised instead."""
    block = asyncio.current_task()
    assert block is not None
    watching = asyncio.create_task(watch)
    watching.add_done_callback(lambda done: None if done.cancelled() else block.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled() and block.uncancel() == 0:
            watching.result()
        raise
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
