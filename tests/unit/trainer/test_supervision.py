"""Supervision names the rank, its host, the command and the cause when not all ranks finish a command."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fuligo.errors import CheckpointError, RankError, TrainerError
from fuligo.trainer.ranks import supervision
from fuligo.trainer.ranks.commands import Answer, SharedCommand, UnexpectedError
from fuligo.trainer.ranks.handle import RankHandle, RankLostError
from fuligo.trainer.ranks.supervision import finish, heartbeat


class ScriptedRank(RankHandle):
    """Rank on which every command has the same outcome."""

    def __init__(self, rank: int, outcome: Coroutine[Any, Any, Answer[Any]] | None = None) -> None:
        super().__init__(rank, f"10.0.0.{rank}")
        self.outcome = outcome

    async def run(self, command: SharedCommand[Any]) -> Answer[Any]:
        assert self.outcome is not None
        return await self.outcome

    async def close(self, *, failed: bool) -> None:
        pass

    def log_hint(self) -> str:
        return "Its log ends: out of memory"


RANKS = [ScriptedRank(rank) for rank in range(3)]
ECHO: Answer[Any] = Answer(error=UnexpectedError("RuntimeError: connection closed by peer"))
HANGS_S = 600.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "GRACE_S", 0.3)
    monkeypatch.setattr(supervision, "HEARTBEAT_TIMEOUT_S", 0.2)


async def says(answer: Answer[Any] | RankLostError, after_s: float = 0.0) -> Answer[Any]:
    await asyncio.sleep(after_s)
    if isinstance(answer, RankLostError):
        raise answer
    return answer


async def failure(*answers: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> str:
    with pytest.raises(TrainerError) as raised:
        await finish("train", RANKS, answers, timeout_s=timeout_s)
    return str(raised.value)


async def test_the_result_is_rank_0s_when_all_have_answered() -> None:
    done = asyncio.create_task(finish("train", RANKS, [says(Answer("result")), says(Answer()), says(Answer(), 0.1)], timeout_s=120))
    await asyncio.sleep(0.05)
    assert not done.done(), "rank 2 has not answered"
    assert await done == "result"
    assert await finish("train", RANKS[:1], [says(Answer("alone"))], timeout_s=120) == "alone"


async def test_ranks_that_are_slower_than_others_are_not_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    num_waits = 0
    wait = asyncio.wait

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        return await wait(*arguments, **options)

    monkeypatch.setattr(asyncio, "wait", counted)
    await finish("train", RANKS, [says(Answer("result"), 0.2), says(Answer()), says(Answer(), 0.1)], timeout_s=120)
    assert num_waits <= len(RANKS) + 1, "the driver's loop would have no time for anything else"


async def test_a_lost_rank_is_the_cause_of_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives of ranks 0 and 2 fail only because rank 1 is gone, which is noticed a moment later."""
    monkeypatch.setattr(supervision, "GRACE_S", HANGS_S)
    lost = RankLostError("ended with exit code -9 (killed, often because memory ran out)")
    said = await failure(says(Answer(error=RuntimeError("connection closed by peer"))), says(lost, 0.1), says(ECHO))
    assert "trainer rank 1 on 10.0.0.1 ended with exit code -9 (killed, often because memory ran out) during `train`" in said
    assert "out of memory" in said
    assert "resume with --load" in said


async def test_a_lost_rank_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "GRACE_S", HANGS_S)
    async with asyncio.timeout(120):
        assert "rank 2 on 10.0.0.2 is gone" in await failure(
            says(Answer(), HANGS_S), says(Answer(), HANGS_S), says(RankLostError("is gone"))
        )


async def test_a_rank_that_failed_is_named_though_others_hang_or_fail_in_consequence() -> None:
    wrong: Answer[Any] = Answer(error=UnexpectedError("IndexError: 7"))
    expected = "trainer rank 2 on 10.0.0.2 failed during `train`: IndexError: 7"
    assert expected in await failure(says(Answer(), HANGS_S), says(Answer(), HANGS_S), says(wrong))
    assert expected in await failure(says(Answer(error=RuntimeError("closed by peer"))), says(Answer()), says(wrong))


async def test_late_ranks_are_named() -> None:
    said = await failure(says(Answer("result")), says(Answer(), HANGS_S), says(Answer(), HANGS_S), timeout_s=0.2)
    assert "trainer rank 1 on 10.0.0.1 did not finish within 0.2 s (nor did rank 2) during `train`" in said
    said = await failure(says(Answer("result"), HANGS_S), says(Answer()), says(Answer()), timeout_s=0.2)
    assert "trainer rank 0 on 10.0.0.0 did not finish within 0.2 s during `train`" in said


async def test_a_rank_that_answers_as_the_deadline_passes_is_not_late() -> None:
    async def answers() -> Answer[str]:
        return Answer("fine")

    assert await finish("save", RANKS, [answers(), answers(), answers()], timeout_s=0) == "fine"


async def test_an_error_of_all_ranks_keeps_its_text_and_type() -> None:
    error = CheckpointError("the checkpoint is of another model")
    refused: Answer[Any] = Answer(error=CheckpointError(str(error)))
    with pytest.raises(CheckpointError) as raised:
        await finish("restore", RANKS, [says(Answer(error=error)), says(refused), says(refused)], timeout_s=120)
    assert raised.value is error


async def test_an_unexpected_error_of_rank_0_alone_is_raised_as_it_is_in_this_process() -> None:
    with pytest.raises(ZeroDivisionError):
        await finish("train", RANKS[:1], [says(Answer(error=ZeroDivisionError()))], timeout_s=120)
    with pytest.raises(TrainerError, match=r"trainer rank 0 on 10\.0\.0\.0 failed during `train`: RuntimeError"):
        await finish("train", RANKS[:1], [says(ECHO)], timeout_s=120)


async def test_heartbeat_names_a_rank_that_is_silent_or_gone() -> None:
    assert await heartbeat(ScriptedRank(3, says(Answer())), "during `train`")
    with pytest.raises(TrainerError, match=r"rank 3 on 10\.0\.0\.3 has not answered for 0\.2 s .* during `save`"):
        await heartbeat(ScriptedRank(3, says(Answer(), HANGS_S)), "during `save`")
    with pytest.raises(TrainerError, match=r"rank 3 on 10\.0\.0\.3 is gone after `train`"):
        await heartbeat(ScriptedRank(3, says(RankLostError("is gone"))), "after `train`")


async def test_heartbeat_gives_a_rank_that_starts_its_time() -> None:
    assert not await heartbeat(ScriptedRank(3, says(Answer(), HANGS_S)), "during start", has_answered=False)


@pytest.mark.parametrize(
    ("answers", "may_restart"),
    [
        ([says(Answer()), says(RankLostError("is gone")), says(Answer())], True),
        ([says(Answer()), says(Answer(error=UnexpectedError("OutOfMemoryError: CUDA out of memory"))), says(Answer())], True),
        ([says(Answer()), says(Answer()), says(Answer(), HANGS_S)], True),
        ([says(Answer(error=TrainerError("the loss is not finite"))) for _ in RANKS], False),
        ([says(Answer()), says(Answer(error=CheckpointError("truncated"))), says(Answer())], False),
    ],
    ids=["lost", "crashed", "late", "all say the same", "one says why"],
)
async def test_an_error_that_a_new_trainer_would_meet_again_is_no_rank_error(answers: list[Any], may_restart: bool) -> None:
    with pytest.raises((TrainerError, CheckpointError)) as raised:
        await finish("train", RANKS, answers, timeout_s=0.5)
    assert isinstance(raised.value, RankError) == may_restart
    if isinstance(raised.value, RankError):
        assert raised.value.event.startswith("trainer rank ") and str(raised.value).startswith(f"{raised.value.event}. Its log ends")
