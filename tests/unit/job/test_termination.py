"""Signals before, in and after the part of a run that can save."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from fuligo.job.watch import Termination, signals_passed_to


def unsaved() -> bool:
    return True


def nothing() -> bool:
    return False


@pytest.fixture
async def run() -> AsyncIterator[asyncio.Task[object]]:
    task: asyncio.Task[object] = asyncio.create_task(asyncio.sleep(3600))
    yield task
    task.cancel()


async def test_a_run_without_the_flag_ends_at_once(run: asyncio.Task[object]) -> None:
    termination = Termination()
    with termination.may_save(unsaved):
        termination.request(run)
    await asyncio.wait([run], timeout=60)
    assert run.cancelled() and termination.requested and not termination.end_of_rollouts.is_set()


async def test_a_run_that_is_still_starting_ends_at_once(run: asyncio.Task[object]) -> None:
    Termination(600).request(run)
    await asyncio.wait([run], timeout=60)
    assert run.cancelled()


async def test_a_run_that_has_nothing_to_save_ends_at_once(run: asyncio.Task[object]) -> None:
    termination = Termination(600, saves_on_interrupt=True)
    with termination.may_save(nothing):
        assert not termination.interrupt(asyncio.get_running_loop())
        termination.request(run)
    await asyncio.wait([run], timeout=60)
    assert run.cancelled()


async def test_a_run_that_can_save_continues_however_often_it_is_asked_to_end(run: asyncio.Task[object]) -> None:
    termination = Termination(600)
    with termination.may_save(unsaved):
        termination.request(run)
        termination.request(run)
        await asyncio.sleep(0)
    assert termination.end_of_rollouts.is_set() and not run.done()


@pytest.mark.parametrize("interrupted_first", [False, True])
async def test_a_run_that_takes_too_long_to_save_is_ended(
    run: asyncio.Task[object], caplog: pytest.LogCaptureFixture, *, interrupted_first: bool
) -> None:
    """A Ctrl-C before SIGTERM gives the run no more time."""
    termination = Termination(0.001, saves_on_interrupt=True)
    with termination.may_save(unsaved):
        if interrupted_first:
            assert termination.interrupt(asyncio.get_running_loop())
        termination.request(run)
        await asyncio.wait([run], timeout=60)
    assert run.cancelled()
    assert "no checkpoint within 0.001 s of SIGTERM (--save-on-sigterm); ending without it" in caplog.text


@pytest.mark.parametrize(("saves", "num_kept"), [(True, 1), (False, 0)])
async def test_the_first_ctrl_c_lets_a_run_save_and_later_ones_go_to_the_previous_handler(
    run: asyncio.Task[object], caplog: pytest.LogCaptureFixture, *, saves: bool, num_kept: int
) -> None:
    passed_on: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: passed_on.append(number))
    try:
        termination = Termination(saves_on_interrupt=saves)
        with signals_passed_to(termination, run), termination.may_save(unsaved):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0)
            assert len(passed_on) == 3 - num_kept
            assert termination.end_of_rollouts.is_set() == saves and not run.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert len(passed_on) == 4 - num_kept, "the handler is restored"
    finally:
        signal.signal(signal.SIGINT, before)
    assert caplog.text.count("press Ctrl-C again to end at once without saving") == num_kept


async def test_an_ignored_ctrl_c_stays_ignored(run: asyncio.Task[object]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        termination = Termination(saves_on_interrupt=True)
        with signals_passed_to(termination, run), termination.may_save(unsaved):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)
        assert not termination.requested
    finally:
        signal.signal(signal.SIGINT, before)
