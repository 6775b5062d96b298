"""Functions that block the event loop are named; functions that wait on it are not."""

import asyncio
import logging
import time
from traceback import FrameSummary

import pytest

from fuligo.job import watch
from fuligo.job.watch import stalls_reported

LIMIT_S = 0.2


async def blocks(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251


async def test_a_function_that_blocks_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with stalls_reported(LIMIT_S):
        await asyncio.create_task(blocks(4 * LIMIT_S))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"s in blocks ({__file__}:" in record.getMessage()


async def test_short_blocks_that_add_up_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """An async reward with blocking work holds up all other rewards, although no call takes long."""
    with stalls_reported(10 * LIMIT_S):
        for _ in range(25):
            await asyncio.create_task(blocks(LIMIT_S / 2))
    (record,) = caplog.records
    assert f"event loop blocked for at least half of {10 * LIMIT_S:g} s in blocks ({__file__}:" in record.getMessage()


async def test_a_function_that_is_seen_a_few_times_is_not_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """By chance, half of ten checks would find a function that takes a tenth of the time."""
    num_checks = 0

    def found(thread: int) -> FrameSummary | None:
        nonlocal num_checks
        num_checks += 1
        return FrameSummary("rewards.py", 7, "reward", lookup_line=False) if num_checks <= 10 else None

    monkeypatch.setattr(watch, "_user_frame", found)
    with stalls_reported(limit_s=10.0):
        while num_checks < 15:  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.01)
    assert caplog.records == []


async def test_functions_that_await_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    limit_s = 1.0  # a busy machine may itself hold up the event loop for some time
    with stalls_reported(limit_s):
        await asyncio.gather(asyncio.sleep(1.5 * limit_s), asyncio.to_thread(time.sleep, 1.5 * limit_s))
    assert caplog.records == []
