"""LoRA on real SGLang engines: the adapter that an engine applies itself against PEFT, and whole runs."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from fuligo.engines.client import POLICY_ADAPTER, EngineClient
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.backend import adapter_arguments
from fuligo.engines.sglang.server import SGLangServer
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.payload import SharedCopies
from fuligo.formats.weight_manifest import EngineAddress, WeightManifest, WeightTarget
from fuligo.models.adapter import adapter_tensors, add_adapter
from fuligo.weights.adapter import send_adapter
from tests.e2e.command import environment
from tests.e2e.warm_children import ForkServer
from tests.sglang import oracle
from tests.sglang.conftest import KEYS
from tests.sglang.engines import ENVIRONMENT, server_settings
from tests.sglang.test_job import command, metrics

PLAIN_MEMORY = {**ENVIRONMENT, "FULIGO_TEST_PLAIN_MEMORY": "1"}
CONFIG = AdapterConfig(rank=4, alpha=16.0, rank_stabilised=True)


@pytest_asyncio.fixture
async def server(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> AsyncIterator[SGLangServer]:
    settings = {"arguments": adapter_arguments([CONFIG], checkpoint, device="cpu"), "environment": PLAIN_MEMORY, "keys": KEYS, "number": 0}
    server = SGLangServer(server_settings("engine", checkpoint, claims, tmp_path / "engine.txt", **settings))
    try:
        await server.wait_ready()
        yield server
    finally:
        await server.stop()


async def test_an_engine_applies_the_adapter_that_it_was_sent_last(server: SGLangServer, checkpoint: Path) -> None:
    """A rank-stabilized adapter on all linear layers, sent twice; then requests without adapter."""
    base, model, copies = oracle.load(checkpoint), oracle.load(checkpoint), SharedCopies()
    add_adapter(model, CONFIG, seed=0)
    policy, plain = (EngineClient(server.url, KEYS, number=0, adapter=name) for name in (POLICY_ADAPTER, None))
    target = EngineAddress(server.url, number=0, keys=KEYS)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in adapter_tensors(model).values():
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(version))
        tensors = [(name, tensor.detach().clone()) for name, tensor in adapter_tensors(model).items()]
        await policy.pause("abort")
        sent: Any = await asyncio.to_thread(
            send_adapter, tensors, CONFIG, WeightTarget("tensor", version, 1 << 20, engines=(target,)), copies
        )
        await policy.resume()
        assert isinstance(sent, WeightManifest), sent
        info = await policy.model_info()
        assert (info.weight_version, info.adapter_digest) == (version, sent.adapter)
        generations = await oracle.sample(policy)
        assert {generation.weight_version for generation in generations} == {version}
        assert oracle.largest_difference(model, generations) < oracle.TOLERANCE
        assert oracle.largest_difference(base, generations) > 100 * oracle.TOLERANCE
    assert oracle.largest_difference(base, await oracle.sample(plain)) < oracle.TOLERANCE
    for client in (policy, plain):
        await client.close()
    copies.close()


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_engines_of_a_run_sample_from_what_is_trained(warm_commands: ForkServer, sync: str, tmp_path: Path) -> None:
    """Each sync is followed by probes, whose log-probabilities engines and trainer compare; so do all samples of each step.

    make test covers adapters by two runs on one engine (test_many.py), merged weights by test_weights.py and
    tests/unit/trainer/test_lora.py.
    """
    flags = {"lora_rank": 16, "lr": 1e-3, "lora_sync": sync, "num_rollout": 2, "rollout_num_gpus": 1, "router_policy": "random"}
    flags["rollout_batch_size"] = 8
    flags["engine_env"] = json.dumps(PLAIN_MEMORY)
    with warm_commands.serving():
        finished = subprocess.run(command(tmp_path / "run", **flags), capture_output=True, text=True, env=environment(), check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    steps = metrics(tmp_path / "run")
    assert len(steps) == 2
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-3
    assert (tmp_path / "run" / "adapters.jsonl").read_text().count("\n") == 3
