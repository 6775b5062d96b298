"""Several LoRA runs on one SGLang engine: requests of all adapters in its batches, versions and pauses of each run by itself."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.backend import adapter_arguments
from fuligo.engines.sglang.server import SGLangServer
from fuligo.engines.shared_client import RunRequests, SharedEngineClient
from fuligo.errors import EngineError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.payload import SharedCopies
from fuligo.formats.weight_manifest import EngineAddress, WeightManifest, WeightTarget
from fuligo.models.adapter import adapter_tensors, add_adapter
from fuligo.weights.adapter import send_adapter
from tests.e2e.command import environment
from tests.e2e.records import sample_rows
from tests.e2e.warm_children import ForkServer
from tests.sglang import oracle
from tests.sglang.conftest import KEYS
from tests.sglang.engines import server_settings
from tests.sglang.test_job import command, metrics
from tests.sglang.test_lora import PLAIN_MEMORY

SHAPES = [AdapterConfig(rank=4, alpha=16.0, rank_stabilised=True), AdapterConfig(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))]


@pytest_asyncio.fixture
async def server(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> AsyncIterator[SGLangServer]:
    settings = {"arguments": adapter_arguments(SHAPES, checkpoint, device="cpu"), "environment": PLAIN_MEMORY, "keys": KEYS, "number": 0}
    server = SGLangServer(server_settings("engine", checkpoint, claims, tmp_path / "engine.txt", **settings))
    try:
        await server.wait_ready()
        yield server
    finally:
        await server.stop()


async def sync(client: SharedEngineClient, model: Any, shape: AdapterConfig, version: int) -> str | None:
    """Send an adapter with new random weights as a trainer does; return its digest."""
    with torch.no_grad():
        for parameter in adapter_tensors(model).values():
            parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(version))
    tensors = [(name, tensor.detach().clone()) for name, tensor in adapter_tensors(model).items()]
    address = EngineAddress(client.url, number=0, keys=KEYS, run=client.run)
    await client.pause("abort")
    sent: Any = await asyncio.to_thread(
        send_adapter, tensors, shape, WeightTarget("tensor", version, 1 << 20, engines=(address,)), SharedCopies()
    )
    assert isinstance(sent, WeightManifest), sent
    info = await client.model_info()
    assert (info.weight_version, info.adapter_digest) == (version, sent.adapter)
    await client.resume()
    return sent.adapter


async def test_runs_sample_at_once_each_with_its_adapter(server: SGLangServer, checkpoint: Path) -> None:
    base, models = oracle.load(checkpoint), [oracle.load(checkpoint) for _ in SHAPES]
    for model, shape in zip(models, SHAPES, strict=True):
        add_adapter(model, shape, seed=0)
    runs = [SharedEngineClient(server.url, RunRequests(name), keys=KEYS, number=0) for name in ("0", "1")]
    with pytest.raises(EngineError, match="has not synced an adapter yet"):
        await runs[0].generate([5], SamplingParams(2), rid="early")
    for version in (1, 2):
        for client, model, shape in zip(runs, models, SHAPES, strict=True):
            await sync(client, model, shape, version)
        together = await asyncio.gather(*(oracle.sample(client) for client in runs))
        for generations, model in zip(together, models, strict=True):
            assert {generation.weight_version for generation in generations} == {version}
            assert oracle.largest_difference(model, generations) < oracle.TOLERANCE
            assert oracle.largest_difference(base, generations) > 30 * oracle.TOLERANCE

    # A sync of one run ends its own requests, and neither those of the other nor what they sample from.
    long = SamplingParams(400, ignore_eos=True, sampling_seed=1)
    first, second = (asyncio.create_task(client.generate([5, 6, 7], long, rid="long")) for client in runs)
    while (await runs[0].load()).num_running < 2:  # noqa: ASYNC110  # the engine is asked as a client would
        await asyncio.sleep(0.01)
    await sync(runs[0], models[0], SHAPES[0], 3)
    assert (await first).finish_reason == "abort" and (await first).weight_version == 2
    answer = await second
    assert (answer.finish_reason, answer.weight_version, len(answer.output_ids)) == ("length", 2, 400)
    assert [(await client.model_info()).weight_version for client in runs] == [3, 2]
    for client in runs:
        await client.close()


def test_runs_train_on_one_engine(warm_commands: ForkServer, tmp_path: Path) -> None:
    """Each sync is followed by probes, whose log-probabilities engine and trainer compare; so do all samples of each step."""
    files = []
    for name, changes in {"wide": {"lora_rank": 16}, "narrow": {"lora_rank": 4, "async_mode": "one-step"}}.items():
        flags = {
            "lr": 1e-3,
            "lora_sync": "adapter",
            "num_rollout": 2,
            "rollout_batch_size": 8,
            "rollout_num_gpus": 1,
            "router_policy": "random",
            **changes,
        }
        arguments = command(tmp_path / name, **flags, engine_env=json.dumps(PLAIN_MEMORY))[4:]
        files.append(tmp_path / f"{name}.yaml")
        save_yaml(parse(arguments).config, files[-1])
    many = [sys.executable, "-m", "fuligo", "train-many", *map(str, files)]
    with warm_commands.serving():
        finished = subprocess.run(many, capture_output=True, text=True, env=environment(), check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for name in ("wide", "narrow"):
        steps = metrics(tmp_path / name)
        assert len(steps) == 2
        assert steps[0]["train/logprob_abs_diff"] < 1e-3
        assert (tmp_path / name / "adapters.jsonl").read_text().count("\n") == 3
        versions = {version for row in sample_rows(tmp_path / name, "versions") for version in row["versions"]}
        assert versions == ({0, 1} if name == "wide" else {0})
