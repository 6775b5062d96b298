"""An engine is killed while it receives weights over NCCL; in the end it and another engine have them, and the trainer continues.

One GPU is the sender's, one is each engine's: with two GPUs there is no other engine.
FULIGO_SGLANG_PYTHON and FULIGO_SGLANG_PYTHONPATH: as for test_sglang_cuda.py.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from fuligo.config.secret import Environment
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet, FleetSettings
from fuligo.engines.sglang.server import ServerSettings, SGLangServer
from fuligo.trainer.protocol import Trainer
from fuligo.weights.sync import WeightSync, WeightSyncSettings
from tests import tiny
from tests.e2e.processes import descendants
from tests.sglang import oracle
from tests.sglang.conftest import fleet_settings
from tests.sglang.test_lost_engine import KillingTrainer

DEVICE = "cuda"
NUM_ENGINES = min(2, torch.cuda.device_count() - 1)
BUCKET_BYTES = 200_000
"""Small enough for several buckets."""
ARGUMENTS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
    "disable_prefill_cuda_graph": True,
    "dtype": "bfloat16",
}
TOLERANCE = 0.1
"""Nats, bfloat16 on both sides; other weights differ by more than ten times as much."""

pytestmark = [
    pytest.mark.skipif("FULIGO_SGLANG_PYTHON" not in os.environ, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the sender needs one GPU, the engine another"),
]


def on_gpu(server: ServerSettings, gpu: int) -> ServerSettings:
    return replace(server, device=DEVICE, gpu_ids=(gpu,), arguments=ARGUMENTS, environment=environment())


def environment() -> Environment:
    return Environment({"PYTHONPATH": os.environ.get("FULIGO_SGLANG_PYTHONPATH", "")})


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetSettings]:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # as SGLang has it: both ends must
    checkpoint = tiny.save_checkpoint(tmp_path / "model", hidden=256, layers=3, head_dim=64)
    with PortClaims() as claims:
        plain = fleet_settings(checkpoint, claims, tmp_path, num_engines=NUM_ENGINES)
        servers = tuple(on_gpu(server, 1 + number) for number, server in enumerate(plain.servers))
        yield replace(plain, servers=servers, router=replace(plain.router, environment=environment()))


@pytest_asyncio.fixture
async def fleet(settings: FleetSettings) -> AsyncIterator[Fleet]:
    fleet = await Fleet.launch(settings)
    yield fleet
    await fleet.stop()


async def test_the_sync_continues(fleet: Fleet, tmp_path: Path) -> None:
    model = oracle.load(tmp_path / "model").to(DEVICE, torch.bfloat16)
    trainer = KillingTrainer(renewed(model, seed=1))
    weight_sync = WeightSync(
        cast(Trainer, trainer), fleet.group, WeightSyncSettings("nccl", BUCKET_BYTES, False, tmp_path / "model", tmp_path)
    )
    fleet.sync_restarted = weight_sync.sync_restarted
    watch = asyncio.create_task(fleet.watch())
    await weight_sync.resync()
    await assert_engines_hold(fleet.group, model, 0)

    victim = fleet.servers[0]
    assert isinstance(victim, SGLangServer)
    trainer.victims = list(descendants(victim.pid))[:1]
    renewed(model, seed=2)
    trainer.num_updates += 1
    assert await weight_sync.sync() == 1
    await assert_engines_hold(fleet.group, model, 1)

    while len(fleet.group.clients) < NUM_ENGINES:  # there is no event to wait for
        assert not watch.done()
        await asyncio.sleep(0.1)
    renewed(model, seed=3)
    trainer.num_updates += 1
    assert await weight_sync.sync() == 2
    await assert_engines_hold(fleet.group, model, 2)
    assert {worker.url for worker in await fleet.router.workers()} == set(fleet.group.urls)
    watch.cancel()
    await asyncio.to_thread(trainer.sender.close)


@torch.no_grad()
def renewed(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Replace all weights by others, large enough that the logits differ clearly."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.1, generator=generator)
    return model


async def assert_engines_hold(engines: EngineGroup, model: PreTrainedModel, version: int) -> None:
    held, other = (oracle.load(Path(model.name_or_path)) for _ in range(2))
    held.load_state_dict({name: weight.float().cpu() for name, weight in model.state_dict().items()})
    renewed(other, seed=100)
    for engine in engines.clients:
        assert (await engine.model_info()).weight_version == version
        generations = await oracle.sample(engine)
        assert oracle.largest_difference(held, generations) < TOLERANCE, engine.url
        assert oracle.largest_difference(other, generations) > 10 * TOLERANCE
