"""Whatever keeps a command from being finished by all ranks is named: the rank, the phase, the cause."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from fuligo.errors import CheckpointError, TrainerError
from fuligo.trainer.ranks import supervision
from fuligo.trainer.ranks.supervision import finish


@dataclass
class ScriptedRanks:
    """The other ranks of four, in whatever state a test wants them."""

    waiting: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)

    def unanswered(self) -> list[int]:
        return self.waiting

    def errors(self) -> dict[int, str]:
        return self.failed

    def lost(self) -> dict[int, int]:
        return self.ended


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(supervision, "GRACE_S", 0.2)


def running() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


def done(result: str | BaseException) -> asyncio.Future[str]:
    future = running()
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


async def test_returns_when_rank_0_and_all_others_are_done():
    await finish("train", done("fine"), ScriptedRanks(), timeout_s=120)
    await finish("train", done("fine"), None, timeout_s=120)
    ranks, own = ScriptedRanks(waiting=[2]), running()
    waiting = asyncio.create_task(finish("train", own, ranks, timeout_s=120))
    await asyncio.sleep(0)
    own.set_result("fine")
    await asyncio.sleep(0.01)
    assert not waiting.done(), "rank 2 has not answered"
    ranks.waiting = []
    await waiting


@pytest.mark.parametrize(("own_done", "late"), [(True, "1, 3"), (False, "0, 1, 3")])
async def test_the_deadline_names_who_is_late(own_done, late):
    with pytest.raises(TrainerError, match=rf"trainer rank {late} did not finish `save` within 0\.05 s"):
        await finish("save", done("fine") if own_done else running(), ScriptedRanks(waiting=[1, 3]), timeout_s=0.05)


async def test_who_answers_while_the_deadline_is_looked_at_is_not_late():
    class AnswersWhenAsked(ScriptedRanks):
        def unanswered(self) -> list[int]:
            waiting, self.waiting = self.waiting, []
            return waiting

    await finish("save", done("fine"), AnswersWhenAsked(waiting=[1]), timeout_s=0)


async def test_a_lost_rank_is_the_cause_of_everything_else():
    """Rank 0's collective breaks, and rank 2's too: both only because rank 1 is gone."""
    ranks = ScriptedRanks(waiting=[1], failed={2: "connection closed by peer"}, ended={1: -9})
    with pytest.raises(TrainerError, match="trainer rank 1 ended with exit code -9 during `train`"):
        await finish("train", done(RuntimeError("connection closed by peer")), ranks, timeout_s=120)


async def test_a_rank_that_is_lost_a_moment_after_rank_0_failed_is_still_the_cause():
    ranks = ScriptedRanks(waiting=[1])
    waiting = asyncio.create_task(finish("train", done(RuntimeError("connection closed by peer")), ranks, timeout_s=120))
    await asyncio.sleep(0.05)
    ranks.ended = {1: 1}
    with pytest.raises(TrainerError, match="trainer rank 1 ended with exit code 1"):
        await waiting


async def test_rank_0s_deliberate_error_comes_through_as_it_is():
    error = CheckpointError("model.safetensors is truncated")
    with pytest.raises(CheckpointError) as caught:
        await finish("restore", done(error), ScriptedRanks(failed={1: str(error)}), timeout_s=120)
    assert caught.value is error


async def test_another_ranks_failure_is_named_even_while_rank_0_hangs():
    with pytest.raises(TrainerError, match="trainer rank 3 failed in `load`: MemoryError: no more"):
        await finish("load", running(), ScriptedRanks(waiting=[1], failed={3: "MemoryError: no more"}), timeout_s=120)


async def test_an_unexpected_error_of_rank_0_alone_is_raised():
    with pytest.raises(ZeroDivisionError):
        await finish("train", done(ZeroDivisionError()), None, timeout_s=120)
