"""SIGTERM before, in and after the part of a run that can save."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fuligo.job.watch import Termination


@pytest.fixture
async def run() -> AsyncIterator[asyncio.Task[object]]:
    task: asyncio.Task[object] = asyncio.create_task(asyncio.sleep(3600))
    yield task
    task.cancel()


async def test_a_run_without_the_flag_ends_at_once(run: asyncio.Task[object]) -> None:
    termination = Termination()
    with termination.may_save():
        termination.request(run)
    await asyncio.wait([run], timeout=60)
    assert run.cancelled() and termination.requested and not termination.end_of_rollouts.is_set()


async def test_a_run_that_is_still_starting_ends_at_once(run: asyncio.Task[object]) -> None:
    Termination(600).request(run)
    await asyncio.wait([run], timeout=60)
    assert run.cancelled()


async def test_a_run_that_can_save_continues_however_often_it_is_asked_to_end(run: asyncio.Task[object]) -> None:
    termination = Termination(600)
    with termination.may_save():
        termination.request(run)
        termination.request(run)
        await asyncio.sleep(0)
    assert termination.end_of_rollouts.is_set() and not run.done()


async def test_a_run_that_takes_too_long_to_save_is_ended(run: asyncio.Task[object], caplog: pytest.LogCaptureFixture) -> None:
    termination = Termination(0.001)
    with termination.may_save():
        termination.request(run)
        await asyncio.wait([run], timeout=60)
    assert run.cancelled()
    assert "no checkpoint within 0.001 s of SIGTERM (--save-on-sigterm); ending without it" in caplog.text
