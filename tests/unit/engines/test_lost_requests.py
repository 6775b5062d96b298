"""Requests through the router and calls to all engines wait while every engine restarts; they do not fail."""

import asyncio
from typing import Any

import pytest

from fuligo.engines.generation import Generation, SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError

PARAMS = SamplingParams(4)


class Engine:
    """Register the engine with the router too."""

    def __init__(self) -> None:
        self.is_dead = False
        self.num_aborts = 0

    async def abort_all(self) -> None:
        if self.is_dead:
            raise EngineError("does not answer")
        self.num_aborts += 1


class Router:
    """Router that forwards all requests to one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rids: list[str] = []
        self.patience = asyncio.Event()
        """It tries again and again, until this."""

    async def generate(self, input_ids: Any, params: SamplingParams, *, rid: str, **_: Any) -> Generation:
        self.rids.append(rid)
        if self.engine.is_dead:
            await self.patience.wait()
            raise EngineError("no engine available")
        return Generation.aborted(len(input_ids))


class Members:
    is_settled = True

    async def is_lost(self, client: Any) -> bool:
        return client.is_dead

    async def admit(self, clients: Any) -> None: ...


def world() -> tuple[EngineGroup, Engine, Router]:
    engine = Engine()
    router = Router(engine)
    return EngineGroup([engine], router, membership=Members()), engine, router


async def test_a_request_that_fails_while_the_last_engine_is_lost_waits_for_the_next() -> None:
    group, engine, router = world()
    engine.is_dead = True
    request = asyncio.create_task(group.generate([1], PARAMS, rid="a"))
    await asyncio.sleep(0)
    group.remove(group.clients[0])
    router.patience.set()
    await asyncio.sleep(0.3)
    assert (router.rids, request.done()) == (["a"], False)
    engine.is_dead = False
    group.clients.append(engine)
    await request
    assert router.rids == ["a", "a"]


async def test_the_wait_has_the_deadline_of_the_request() -> None:
    group, _, router = world()
    group.remove(group.clients[0])
    with pytest.raises(EngineError, match="all engines were lost and none restarted within 0 s"):
        await group.generate([1], PARAMS, rid="a", timeout_s=0)
    assert router.rids == []


async def test_a_request_that_fails_by_itself_is_not_sent_again() -> None:
    group, engine, router = world()
    engine.is_dead = True
    router.patience.set()
    with pytest.raises(EngineError, match="no engine available"):
        await group.generate([1], PARAMS, rid="a")
    assert router.rids == ["a"]


async def test_nobody_is_left_to_be_told_to_abort() -> None:
    group, engine, _ = world()
    await group.abort_all()
    engine.is_dead = True
    await group.abort_all()
    assert engine.num_aborts == 1
