"""What is said of ranks that are lost, late or wrong; scripted ranks, no cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from fuligo.cluster import supervision
from fuligo.cluster.rank import Answer
from fuligo.cluster.reservation import Bundle, physical_order
from fuligo.cluster.supervision import RankHandle, finish, heartbeat
from fuligo.errors import CheckpointError, TrainerError


class Pid:
    def __init__(self, answer: Coroutine[Any, Any, int]) -> None:
        self._answer = answer

    def remote(self) -> Coroutine[Any, Any, int]:
        return self._answer


class Actor:
    def __init__(self, answer: Coroutine[Any, Any, int]) -> None:
        self.pid = Pid(answer)


async def says(answer: Any, after_s: float = 0.0) -> Any:
    await asyncio.sleep(after_s)
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "GRACE_S", 0.3)
    monkeypatch.setattr(supervision, "HEARTBEAT_TIMEOUT_S", 0.2)


@pytest.fixture
def ranks(tmp_path: Path) -> list[RankHandle]:
    return [RankHandle(rank, f"10.0.0.{rank}", None, tmp_path / f"trainer-rank-{rank}.txt") for rank in range(3)]


async def failure(ranks: list[RankHandle], *answers: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> str:
    with pytest.raises(TrainerError) as raised:
        await finish("train", ranks, answers, timeout_s=timeout_s)
    return str(raised.value)


async def test_the_result_is_rank_0s(ranks: list[RankHandle]) -> None:
    assert await finish("train", ranks, [says(Answer("result")), says(Answer()), says(Answer(), 0.05)], timeout_s=120) == "result"


async def test_for_ranks_that_are_slower_than_others_nobody_asks_again_and_again(
    ranks: list[RankHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waits = 0
    wait = asyncio.wait

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        return await wait(*arguments, **options)

    monkeypatch.setattr(asyncio, "wait", counted)
    await finish("train", ranks, [says(Answer("result"), 0.2), says(Answer()), says(Answer(), 0.1)], timeout_s=120)
    assert num_waits <= len(ranks) + 1, "the driver's loop would have no time for anything else"


async def test_a_rank_that_died_is_named_and_not_those_who_waited_for_it(ranks: list[RankHandle]) -> None:
    ranks[1].log_file.write_text("one\nout of memory\n")
    echo = Answer(error=TrainerError("RuntimeError: connection closed by peer"))
    said = await failure(ranks, says(echo), says(ActorDiedError(), 0.1), says(echo))
    assert "trainer rank 1 on 10.0.0.1 is gone" in said
    assert "during `train`" in said
    assert "out of memory" in said
    assert "resume with --load" in said


async def test_a_rank_that_failed_is_named_though_others_hang(ranks: list[RankHandle]) -> None:
    wrong = Answer(error=TrainerError("IndexError: 7"))
    said = await failure(ranks, says(Answer(), 600), says(Answer(), 600), says(wrong))
    assert "trainer rank 2 on 10.0.0.2 failed in `train`: IndexError: 7" in said


async def test_the_latest_are_named(ranks: list[RankHandle]) -> None:
    said = await failure(ranks, says(Answer("result")), says(Answer(), 600), says(Answer(), 600), timeout_s=0.2)
    assert "trainer rank 1 on 10.0.0.1 did not finish within 0.2 s (nor did ranks 2) during `train`" in said


async def test_what_all_ranks_refuse_keeps_its_text_and_type(ranks: list[RankHandle]) -> None:
    refused = Answer(error=CheckpointError("the checkpoint is of another model"), is_deliberate=True)
    with pytest.raises(CheckpointError, match="of another model"):
        await finish("restore", ranks, [says(refused), says(refused), says(refused)], timeout_s=120)


async def test_heartbeats(tmp_path: Path) -> None:
    def rank(answer: Coroutine[Any, Any, int]) -> RankHandle:
        return RankHandle(3, "10.0.0.3", Actor(answer), tmp_path / "log.txt")

    await heartbeat(rank(says(4711)), "train")
    with pytest.raises(TrainerError, match=r"rank 3 on 10.0.0.3 has not answered for 0.2 s .* during `save`"):
        await heartbeat(rank(says(4711, 60)), "save")
    with pytest.raises(TrainerError, match=r"rank 3 on 10\.0\.0\.3 is gone"):
        await heartbeat(rank(says(ActorDiedError())), "train")


def test_nodes_of_one_size_are_taken_in_the_order_of_their_addresses() -> None:
    """The last node of the plan takes less, and stays the last."""
    given = [Bundle(0, 8, "c", "10.0.0.10"), Bundle(1, 8, "a", "10.0.0.9"), Bundle(2, 8, "b", "10.0.0.2"), Bundle(3, 4, "d", "10.0.0.1")]
    assert [bundle.host for bundle in physical_order(given)] == ["10.0.0.2", "10.0.0.9", "10.0.0.10", "10.0.0.1"]
