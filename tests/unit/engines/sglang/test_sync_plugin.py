"""Pauses and group joins of the plugin `fuligo_sync`. Streams: tests/unit/weights/test_stream.py, tests/sglang/test_weights.py."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fuligo.engines.host import listening_store
from tests.unit.weights.dying_engine import fuligo_sync


@dataclass
class Manager:
    """SGLang's manager of requests, of which some miss the first abort because they are on their way to the scheduler."""

    num_readers: int
    num_late: int
    is_pause: bool = False
    is_pause_cond: asyncio.Condition = field(default_factory=asyncio.Condition)
    num_readers_at_abort: list[int] = field(default_factory=list)

    @property
    def model_update_lock(self) -> "Manager":
        return self

    async def is_locked(self) -> bool:
        return self.num_readers > 0

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all and self.is_pause, "requests that arrive from now on must wait"
        self.num_readers_at_abort.append(self.num_readers)
        self.num_readers = self.num_late
        self.num_late = 0


async def test_a_pause_aborts_until_no_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuligo_sync, "NUM_POLLS", 2)
    manager, passed_on = Manager(num_readers=5, num_late=2), []

    async def pause(*arguments: Any) -> None:
        passed_on.append(arguments)

    await fuligo_sync.pause_generation(pause, manager, SimpleNamespace(mode="abort"))
    assert manager.is_pause and manager.num_readers_at_abort == [5, 2] and not passed_on
    assert not manager.is_pause_cond.locked()


def test_an_engine_joins_a_group_only_while_its_sender_listens() -> None:
    joined: list[str] = []

    def join(runner: object, host: str, port: int, offset: int, world_size: int, name: str, backend: str) -> tuple[bool, str]:
        joined.append(name)
        return True, "joined"

    runner, store = SimpleNamespace(tp_rank=1), listening_store("127.0.0.1")
    port = store.port
    assert fuligo_sync.init_weights_update_group(join, runner, "127.0.0.1", port, 2, 4, "open") == (True, "joined")
    assert store.check(["open/stream/rank/3"]), "announced"
    del store, fuligo_sync._stores["open"]
    has_joined, message = fuligo_sync.init_weights_update_group(join, runner, "127.0.0.1", port, 2, 4, "closed")
    assert not has_joined and f"its sender does not listen at 127.0.0.1:{port} (" in message
    assert joined == ["open"]


async def test_other_modes_are_sglangs() -> None:
    manager, passed_on = Manager(num_readers=5, num_late=0), []

    async def pause(*arguments: Any) -> None:
        passed_on.append(arguments)

    request = SimpleNamespace(mode="retract")
    await fuligo_sync.pause_generation(pause, manager, request)
    assert passed_on == [(manager, request)] and not manager.num_readers_at_abort
