"""Requests stay in the engines over weight syncs (--update-weight-requests continue), and each token belongs to one version."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.generation import Generation, SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet
from fuligo.formats.weight_manifest import Transport
from fuligo.weights.senders import WeightSender
from tests.sglang import oracle
from tests.sglang.conftest import KEYS, fleet_settings
from tests.sglang.test_weights import sender, sync

__all__ = ["sender"]

LONG = SamplingParams(max_new_tokens=960, ignore_eos=True)
NUM_TOKENS_BETWEEN = 40
"""Tokens of each running request between two syncs."""
MAX_SYNCS = 9
WATCHDOG_S = 2


@torch.no_grad()
def logprobs(models: dict[int, PreTrainedModel], prompt: Sequence[int], generation: Generation) -> np.ndarray:
    """Return [R] log-probabilities of the tokens by transformers, whose weights change where the generation's versions do.

    Keys and values of earlier tokens stay as the earlier weights computed them.
    """
    response, versions = generation.output_ids.tolist(), generation.versions
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(response)]
    ids, cache, parts = [*prompt, *response], DynamicCache(), []
    for first, end in pairwise(bounds):
        read = len(prompt) + first - 1 if first else 0
        fed = torch.tensor([ids[read : len(prompt) + end - 1]])
        scores = models[int(versions[first])](fed, past_key_values=cache, use_cache=True).logits[0, first - end :].log_softmax(-1)
        parts.append(scores.gather(1, torch.tensor(response[first:end])[:, None])[:, 0].numpy())
    return np.concatenate(parts)


async def until_sampled(engines: Sequence[InferenceEngine], running: Sequence[asyncio.Task[Generation]]) -> None:
    """Wait until the running requests have more tokens."""

    async def usage() -> float:
        return sum([(await engine.load()).kv_usage or 0.0 for engine in engines])

    before = await usage()
    while await usage() - before < NUM_TOKENS_BETWEEN * len(oracle.PROMPTS) / 65536:
        assert not any(request.done() for request in running)
        await asyncio.sleep(0.01)


async def keep_sampling(
    engines: EngineGroup, prompt: list[int], name: str, stop: asyncio.Event, found: list[tuple[list[int], Generation]]
) -> None:
    """Have one long request of the prompt in flight at any time, and collect the ended ones."""
    for number in count():
        found.append((prompt, await engines.generate(prompt, LONG, rid=f"{name}-{number}")))
        if stop.is_set():
            return


# The scheduler pauses, and labels tokens, in the same way for all transports; tests/sglang/test_weights.py sends weights by each.
@pytest.mark.parametrize(
    "transport", [pytest.param("tensor", marks=pytest.mark.slow), "gloo", pytest.param("disk", marks=pytest.mark.slow)]
)
async def test_requests_continue_with_the_new_weights(
    sender: WeightSender, engines: EngineGroup, checkpoint: Path, tmp_path: Path, transport: Transport
) -> None:
    """Weights are synced until a request has been in flight over two syncs, which a busy machine may need several syncs for."""
    first = {"tensor": 100, "gloo": 110, "disk": 120}[transport]
    models: dict[int, PreTrainedModel] = {}

    async def update(version: int) -> None:
        models[version] = oracle.perturbed(oracle.load(checkpoint), seed=version)
        copytree(checkpoint, tmp_path / str(version), ignore=ignore_patterns("*.safetensors"))
        await sync(sender, engines, models[version], transport, version, tmp_path / str(version), pause="in_place")

    await update(first)
    stop, long = asyncio.Event(), list[tuple[list[int], Generation]]()
    running = [
        asyncio.create_task(keep_sampling(engines, prompt, f"long-{transport}-{n}", stop, long)) for n, prompt in enumerate(oracle.PROMPTS)
    ]
    beside: list[tuple[int, list[Generation]]] = []
    for version in range(first, first + MAX_SYNCS):
        if version > first:
            await update(version)
        sampled = await asyncio.gather(*(oracle.sample(engine, num_tokens=4) for engine in engines.clients))
        beside += [(version, others) for others in sampled]
        if any(len(set(generation.versions.tolist())) > 2 for _, generation in long):
            break
    again = await oracle.sample(engines.clients[0], num_tokens=4)
    stop.set()
    await asyncio.gather(*running)

    newest = models[max(models)]
    assert oracle.largest_difference(newest, again) < oracle.TOLERANCE
    assert all(other.cached_tokens == len(prompt) - 1 for other, prompt in zip(again, oracle.PROMPTS))
    for version, others in beside:
        assert oracle.largest_difference(models[version], others) < oracle.TOLERANCE, "they must not read keys of older weights"
        assert all(set(other.versions.tolist()) == {version} for other in others)
    assert any(len(set(generation.versions.tolist())) > 2 for _, generation in long)
    for prompt, generation in long:
        versions = sorted(set(generation.versions.tolist()))
        assert (generation.finish_reason, len(generation.output_ids)) == ("length", LONG.max_new_tokens)
        assert versions == [*range(versions[0], versions[-1] + 1)] and (np.diff(generation.versions) >= 0).all()
        assert np.abs(generation.logprobs - logprobs(models, prompt, generation)).max() < oracle.TOLERANCE
        if len(versions) > 1:
            assert np.abs(generation.logprobs - oracle.logprobs(models[versions[0]], prompt, generation.output_ids)).max() > 0.1
    for engine in engines.clients:  # the long requests have left keys of all weights in the cache
        assert oracle.largest_difference(newest, await oracle.sample(engine)) < oracle.TOLERANCE


@pytest.mark.slow
async def test_a_pause_may_last_longer_than_the_watchdog_waits(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> None:
    """SGLang's watchdog would end the engine, because it has a request but begins no step."""
    settings = fleet_settings(checkpoint, claims, tmp_path, num_engines=1, restart=False)
    server = replace(settings.servers[0], arguments={**settings.servers[0].arguments, "watchdog_timeout": WATCHDOG_S})
    fleet = await Fleet.launch(replace(settings, servers=(server,)))
    engines = EngineGroup.connect(fleet.group.urls, keys=KEYS, timeout_s=120.0)
    try:
        running = asyncio.create_task(engines.generate(oracle.PROMPTS[0], LONG, rid="long"))
        await until_sampled(engines.clients, [running])
        await engines.pause("in_place")
        await asyncio.sleep(4 * WATCHDOG_S)
        await engines.resume()
        assert len((await running).output_ids) == LONG.max_new_tokens
    finally:
        await engines.close()
        await fleet.stop()
