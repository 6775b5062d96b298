"""Requests with routing or scoring data, which a router would not forward: their body, destination and parsed answer."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fuligo.engines.client import EngineClient
from fuligo.engines.generation import Generation, RoutingQuery, SamplingParams
from fuligo.engines.group import MAX_AHEAD, EngineGroup
from fuligo.errors import EngineError
from fuligo.models.routing import RoutingShape

PARAMS = SamplingParams(4)
SHAPE = RoutingShape(num_layers=2, moe_layers=(1,), num_experts=8, top_k=2)
EXPERTS = np.array([[[0, 0], [token, token + 1]] for token in range(6)], np.int32)
"""Experts of all tokens except the last one, for four prompt tokens and three new ones."""


def query(num_known: int = 0, affinity: int = 0) -> RoutingQuery:
    return RoutingQuery(SHAPE, num_known, affinity)


class Recording:
    """Return an engine that answers three tokens, and the experts from `routed_experts_start_len` on."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.records = True
        self.num_sampled = 3

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        ids = [5, 6, 7][: self.num_sampled]
        meta: dict[str, Any] = {"finish_reason": {"type": "abort"}, "prompt_tokens": 4, "weight_version": "0"}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
        if self.records and body.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(EXPERTS[body["routed_experts_start_len"] :].tobytes()).decode()
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Recording, str]]:
    state, app = Recording(), web.Application()
    app.router.add_post("/generate", state.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield state, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_the_experts_of_tokens_that_are_not_known_yet_are_asked_for(server: tuple[Recording, str]) -> None:
    state, url = server
    client = EngineClient(url)
    fresh = await client.generate([1, 2, 3, 4], PARAMS, rid="a", routing=query())
    continued = await client.generate([1, 2, 3, 4], PARAMS, rid="b", routing=query(num_known=2))
    unasked = await client.generate([1, 2, 3, 4], PARAMS, rid="c")
    assert [body.get("routed_experts_start_len") for body in state.bodies] == [0, 2, None]
    assert fresh.routed_experts is not None and np.array_equal(fresh.routed_experts, EXPERTS[:, 1:])
    assert continued.routed_experts is not None and np.array_equal(continued.routed_experts, EXPERTS[2:, 1:])
    assert unasked.routed_experts is None
    await client.close()


async def test_an_engine_that_does_not_record_is_an_error_at_once(server: tuple[Recording, str]) -> None:
    state, url = server
    state.records = False
    client = EngineClient(url)
    with pytest.raises(EngineError, match=rf"{url}: malformed answer .* no routed_experts.*--enable-return-routed-experts"):
        await client.generate([1, 2, 3, 4], PARAMS, rid="a", routing=query())
    assert len(state.bodies) == 1
    state.num_sampled = 0  # aborted before anything was computed
    nothing = await client.generate([1, 2, 3, 4], PARAMS, rid="b", routing=query(num_known=2))
    assert nothing.routed_experts is not None and nothing.routed_experts.shape == (0, 1, 2)
    await client.close()


class FakeClient:
    """Engine that answers when told to, or fails."""

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name, self.fails, self.rids = name, fails, list[str]()

    async def generate(self, input_ids: Any, params: SamplingParams, *, rid: str, **_: Any) -> Generation:
        self.rids.append(rid)
        if self.fails:
            raise EngineError(f"{self.name} is gone")
        return Generation.aborted(len(input_ids))


class LostMembers:
    """Fleet that considers engines dead once they fail."""

    async def is_lost(self, client: Any) -> bool:
        return client.fails

    async def admit(self, clients: Any) -> None: ...


def group_of(*clients: FakeClient, members: LostMembers | None = None) -> EngineGroup:
    router = FakeClient("router", fails=True)
    return EngineGroup(clients, router, membership=members)


async def test_requests_go_past_the_router_and_those_of_a_group_to_one_engine() -> None:
    one, two = FakeClient("one"), FakeClient("two")
    group = group_of(one, two)
    answers = [await group.generate([1], PARAMS, rid=f"{n}", routing=query(affinity=n // 3)) for n in range(9)]
    assert (one.rids, two.rids) == (["0", "1", "2", "6", "7", "8"], ["3", "4", "5"])
    assert [answer.engine for answer in answers] == [0] * 3 + [1] * 3 + [0] * 3
    assert group.served.num_prompt_tokens == 9


async def test_an_engine_that_is_far_ahead_gets_no_more() -> None:
    one, two = FakeClient("one"), FakeClient("two")
    group = group_of(one, two)
    group._num_direct[one] = MAX_AHEAD + 1
    await group.generate([1], PARAMS, rid="a", routing=query(affinity=0))
    assert two.rids == ["a"]


async def test_a_request_whose_engine_dies_goes_to_another() -> None:
    dead, alive = FakeClient("dead", fails=True), FakeClient("alive")
    group = group_of(dead, alive, members=LostMembers())
    await group.generate([1], PARAMS, rid="a", routing=query(affinity=0))
    assert (dead.rids, alive.rids) == (["a"], ["a"])
    assert group.clients == [alive]
    alive.fails = True
    with pytest.raises(EngineError, match="all engines were lost and none restarted within 0 s"):
        await group.generate([1], PARAMS, rid="b", routing=query(), timeout_s=0)
    waiting = asyncio.create_task(group.generate([1], PARAMS, rid="c", routing=query()))
    await asyncio.sleep(0)
    back = FakeClient("back")
    group.clients.append(back)
    await waiting
    assert back.rids == ["c"]


async def test_the_error_of_an_engine_that_lives_is_the_requests() -> None:
    with pytest.raises(EngineError, match="one is gone"):
        await group_of(FakeClient("one", fails=True), FakeClient("two")).generate([1], PARAMS, rid="a", routing=query())
