"""Separate prefill and decode engines; mooncake transfers the KV cache over TCP, without a network card."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet
from fuligo.formats.weight_manifest import EngineAddress, WeightTarget
from fuligo.weights.senders import WeightSender
from tests.sglang import oracle
from tests.sglang.conftest import KEYS, fleet_settings
from tests.sglang.engines import ENVIRONMENT, server_settings, sglang_python

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
TRANSFER = {"disaggregation_transfer_backend": "mooncake_tcp"}


def has_mooncake() -> bool:
    python = sglang_python()
    return python is not None and not subprocess.run([python, "-c", "import mooncake.engine"], capture_output=True, check=False).returncode


pytestmark = pytest.mark.skipif(not has_mooncake(), reason="mooncake is not there: see docs/sglang.md")


@pytest_asyncio.fixture
async def fleet(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> AsyncIterator[Fleet]:
    environment = {**ENVIRONMENT, "SGLANG_HOST_IP": "127.0.0.1"}
    servers = tuple(
        server_settings(kind, checkpoint, claims, tmp_path / f"{kind}.txt", worker_type=kind, arguments=TRANSFER, environment=environment)
        for kind in ("prefill", "decode")
    )
    settings = fleet_settings(checkpoint, claims, tmp_path, num_engines=0, restart=False)
    fleet = await Fleet.launch(replace(settings, servers=servers, router=replace(settings.router, prefill_decode=True)))
    yield fleet
    await fleet.stop()


async def test_pairs_sample_what_the_model_says_through_aborts_and_syncs(fleet: Fleet, checkpoint: Path) -> None:
    model = oracle.load(checkpoint)
    (router,) = fleet.group.answering
    assert oracle.largest_difference(model, await oracle.sample(router)) < oracle.TOLERANCE

    # An abort ends running requests with their tokens so far, and later requests succeed.
    running = [asyncio.create_task(fleet.group.generate(oracle.PROMPTS[0], LONG, rid=f"long-{n}", timeout_s=60)) for n in range(8)]
    await asyncio.sleep(1.0)
    await fleet.group.pause("abort")
    cut = await asyncio.gather(*running)
    assert all(generation.finish_reason == "abort" for generation in cut if len(generation.output_ids) < LONG.max_new_tokens)
    assert any(generation.finish_reason == "abort" for generation in cut)

    # Both engines receive the weights.
    oracle.perturbed(model, seed=1)
    target = WeightTarget("tensor", 1, 40_000, tuple(EngineAddress(url, keys=KEYS) for url in fleet.group.urls))
    await asyncio.to_thread(WeightSender().send, list(model.named_parameters()), target)
    await fleet.group.resume()
    assert [info.weight_version for _, info in await fleet.group.model_infos()] == [1, 1]
    assert oracle.largest_difference(model, await oracle.sample(router)) < oracle.TOLERANCE
