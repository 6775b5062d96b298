"""Commands reach every follower; of a command with shares each gets its own, and nothing of it stays."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fuligo.trainer.ranks import heartbeats, worker, world
from fuligo.trainer.ranks.commands import CLOSE, Address, Command, CommandReceiver, CommandSender, DividedCommand
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.rank import follow

REPLICAS = [0, 1, 0, 2]
"""Of ranks 0 to 3; rank 0, which sends, is not alone in its replica."""


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def address(store: TCPStore) -> Address:
    return Address("127.0.0.1", store.port)


def test_a_follower_gets_the_share_of_its_replica(address: Address) -> None:
    sender = CommandSender(address.connect(), len(REPLICAS))
    receivers = {rank: CommandReceiver(address.connect(), rank) for rank in (1, 2, 3)}
    for command, received in [
        (Command("offload"), [Command("offload")] * 3),
        (DividedCommand("train", ["zero", "one", "two"], REPLICAS), [Command("train", (share,)) for share in ("one", "zero", "two")]),
        (Command("onload"), [Command("onload")] * 3),
    ]:
        sender.send(command)
        assert [receiver.receive() for receiver in receivers.values()] == received


def test_the_store_holds_no_share_that_nobody_fetches_and_none_after_the_command(address: Address) -> None:
    sender, store = CommandSender(address.connect(), 3), PrefixStore("fuligo/commands", address.connect())
    sender.send(DividedCommand("train", ["zero", "one", "two"], [0, 1, 2]))
    assert [store.check([f"0/share/{replica}"]) for replica in range(3)] == [False, True, True]
    sender.forget()
    assert not any(store.check([key]) for key in ("0", "0/share/1", "0/share/2"))


class Held:
    """Something that can be seen to be gone."""


def soon(condition: Callable[[], bool]) -> bool:
    """It becomes true within a few seconds: other threads are on their way to it."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_work_that_is_done_holds_on_to_nothing() -> None:
    compute, held = ComputeThread("test"), Held()
    gone = weakref.ref(held)
    compute.submit(lambda held=held: held).result()
    del held
    assert soon(lambda: gone() is None)
    compute.stop()


@dataclass
class Trained:
    """A worker that remembers what it trained on without keeping it."""

    seen: list[weakref.ref[Held]] = field(default_factory=list)

    def train(self, share: Held) -> None:
        self.seen.append(weakref.ref(share))


def test_a_follower_that_waits_for_the_next_command_holds_on_to_nothing(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    monkeypatch.setattr(heartbeats, "beat", lambda *_: None)
    monkeypatch.setattr(world, "join_trainer", lambda *_: None)
    monkeypatch.setattr(worker, "build_worker", lambda *_: trained)
    sender = CommandSender(address.connect(), 2)
    follower = threading.Thread(target=follow, args=(1, 2, address), daemon=True)
    follower.start()

    def carried_out(command: Any) -> None:
        sender.send(command)
        assert soon(lambda: not sender.unanswered())
        assert not sender.errors()

    carried_out(Command("load", (None,)))
    carried_out(DividedCommand("train", [None, Held()], [0, 1]))
    (gone,) = trained.seen
    assert soon(lambda: gone() is None)
    carried_out(Command(CLOSE))
    follower.join(120)
    assert not follower.is_alive()
