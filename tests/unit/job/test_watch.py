"""A background task ends a part of a run only by an error."""

import asyncio
from contextlib import suppress

import pytest

from fuligo.errors import EngineError
from fuligo.job.watch import failing_with, while_watching


async def fails() -> None:
    raise EngineError("did not start")


async def test_an_error_ends_the_block_and_is_raised_instead() -> None:
    with pytest.raises(EngineError, match="did not start"):
        async with failing_with(asyncio.create_task(fails())), asyncio.timeout(120):
            await asyncio.Event().wait()
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_an_error_of_what_is_watched_ends_the_block_too() -> None:
    with pytest.raises(EngineError, match="did not start"):
        async with while_watching(fails()), asyncio.timeout(120):
            await asyncio.Event().wait()
    await asyncio.sleep(0)


async def test_what_ends_well_ends_nothing() -> None:
    async with failing_with(asyncio.create_task(asyncio.sleep(0, "result"))):
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize("num_turns", range(4), ids="{} turns of the event loop later".format)
async def test_an_error_after_the_block_is_raised_where_the_task_is_awaited(num_turns: int) -> None:
    """Includes an error in the moment in which the block ends."""
    may_fail = asyncio.Event()

    async def fails_then() -> None:
        await may_fail.wait()
        await fails()

    task = asyncio.create_task(fails_then())
    async with failing_with(task):
        may_fail.set()
        if num_turns == 0:
            await asyncio.sleep(0)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    with pytest.raises(EngineError):
        await task
    await asyncio.sleep(0)


async def test_cancelling_the_block_cancels_the_watch() -> None:
    began = asyncio.Event()

    async def block() -> None:
        async with while_watching(asyncio.Event().wait()):
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await began.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
