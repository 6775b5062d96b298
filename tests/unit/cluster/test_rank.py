"""Handles of ranks on Ray, and the order of nodes; scripted actors, no cluster."""

from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import ActorDiedError

from fuligo.cluster.rank import ActorRank
from fuligo.cluster.reservation import Bundle, physical_order
from fuligo.trainer.ranks.commands import Answer, Command, SharedCommand
from fuligo.trainer.ranks.handle import PING, RankLostError


class ScriptedActor:
    """Stand-in for an actor's handle, and for its method `run`."""

    def __init__(self, answer: Answer[None] | Exception) -> None:
        self.run = self
        self.answer = answer

    async def remote(self, command: Command[None]) -> Answer[None]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)


async def test_a_rank_whose_actor_died_is_lost(tmp_path: Path) -> None:
    ping = SharedCommand(PING)
    assert await ActorRank(3, "10.0.0.3", ScriptedActor(Answer()), tmp_path / "log.txt").run(ping) == Answer()
    with pytest.raises(RankLostError, match=r"^was lost \(The actor died"):
        await ActorRank(3, "10.0.0.3", ScriptedActor(ActorDiedError()), tmp_path / "log.txt").run(ping)


def test_log_hint_holds_the_end_of_a_readable_log(tmp_path: Path) -> None:
    log = tmp_path / "trainer-rank-1.txt"
    rank = ActorRank(1, "10.0.0.1", None, log)
    assert rank.log_hint() == f"Its log, on that host, is {log}."
    log.write_text("one\nout of memory\n")
    assert rank.log_hint() == f"Its log ({log}) ends:\none\nout of memory"


def test_nodes_of_one_size_are_taken_in_the_order_of_their_addresses() -> None:
    """The last node of the plan takes less, and stays the last."""
    given = [Bundle(0, 8, "c", "10.0.0.10"), Bundle(1, 8, "a", "10.0.0.9"), Bundle(2, 8, "b", "10.0.0.2"), Bundle(3, 4, "d", "10.0.0.1")]
    assert [bundle.host for bundle in physical_order(given)] == ["10.0.0.2", "10.0.0.9", "10.0.0.10", "10.0.0.1"]
