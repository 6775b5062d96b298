"""Embedded engines behind the real router, which rebuilds every request by its own schema."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest_asyncio

from fuligo.engines.client import EngineClient
from fuligo.engines.embedded.launch import EmbeddedEngineSettings, launch_embedded
from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.router import launch_router
from tests.sglang.conftest import KEYS, fleet_settings

PARAMS = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, stop=("zz",), stop_token_ids=(7,), sampling_seed=3)


@pytest_asyncio.fixture
async def engines(warm_children: None, checkpoint: Path, claims: PortClaims, tmp_path: Path) -> AsyncIterator[EngineGroup]:
    """Start two embedded engines and the router."""
    started = [
        await launch_embedded(EmbeddedEngineSettings(str(checkpoint), tmp_path / f"{n}.txt", device="cpu", keys=KEYS)) for n in range(2)
    ]
    router = await launch_router(fleet_settings(checkpoint, claims, tmp_path).router)
    for engine in started:
        await router.add(engine.url, KEYS.requests)
    group = EngineGroup.connect([engine.url for engine in started], keys=KEYS, router_url=router.url, retries=0, timeout_s=60)
    yield group
    await group.close()
    await router.stop()
    for engine in started:
        await engine.stop()


async def test_what_comes_through_the_router_is_answered_as_what_comes_directly(engines: EngineGroup) -> None:
    prompts = [[5, 6, number] for number in range(8, 16)]
    direct = EngineClient(engines.urls[0], KEYS, retries=0)
    for number, prompt in enumerate(prompts):
        params = replace(PARAMS, sampling_seed=number)
        routed = await engines.generate(prompt, params, rid=f"routed-{number}")
        alone = await direct.generate(prompt, params, rid=f"direct-{number}")
        assert list(routed.output_ids) == list(alone.output_ids)
        assert routed.finish_reason == alone.finish_reason
        assert abs(routed.logprobs - alone.logprobs).max() < 1e-5
    await direct.close()
    arrived = [(await client.load()).num_arrived for client in engines.clients]
    assert arrived == [len(prompts) // 2 + len(prompts), len(prompts) // 2], "the router gave each engine half of them"
