"""The MTP layer of Qwen3-Next on one GPU: SGLang drafts with what the trainer sends, and a trained layer's drafts are accepted.

FULIGO_SGLANG_PYTHON and FULIGO_SGLANG_PYTHONPATH are as in test_sglang_cuda.py; one GPU holds engine and trainer:

    python -m pytest -s tests/gpu/test_mtp_sglang_cuda.py
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from fuligo.engines.client import EngineClient
from fuligo.engines.generation import Generation, SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import SGLangServer
from fuligo.formats.hugging_face import MTP_PREFIX
from fuligo.formats.weight_manifest import EngineAddress, EngineFormat, WeightManifest, WeightTarget
from fuligo.models.registry import experts_in
from fuligo.trainer.mtp import MTPTraining
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.world import World, join_world
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainSample
from fuligo.weights.senders import WeightSender
from tests import shares, tiny_mtp, train_batches
from tests.served_families import ServedFamily
from tests.sglang.engines import server_settings

pytestmark = pytest.mark.skipif("FULIGO_SGLANG_PYTHON" not in os.environ, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang")

VOCABULARY, FIRST, LENGTH, PROMPT = 512, 3, 96, 8
NUM_STEPS = 50
FAMILY = ServedFamily(
    {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    served={"full_attention_interval": 4},
)
ARGUMENTS: Mapping[str, object] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.45,
    "max_total_tokens": 32768,
    "max_running_requests": 16,
    "cuda_graph_max_bs_decode": 8,
    "disable_prefill_cuda_graph": True,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}


@pytest.fixture(scope="module", autouse=True)
def cuda_world() -> Iterator[None]:
    """Join a world of one rank with a process group, which half precision under FSDP needs."""
    join_world(0, 1, "cuda", store=HashStore(), key=None, timeout_s=60)
    yield
    dist.destroy_process_group()


def sequence(seed: int) -> np.ndarray:
    """Return tokens that each follow from the one before, by a rule that a model and its layer learn in fifty steps."""
    ids = [FIRST + seed % (VOCABULARY - FIRST)]
    while len(ids) < LENGTH:
        ids.append(FIRST + (5 * (ids[-1] - FIRST) + 7) % (VOCABULARY - FIRST))
    return np.array(ids, np.int32)


def sample(index: int, ids: np.ndarray) -> TrainSample:
    zeros = np.zeros(len(ids) - PROMPT, np.float32)
    return TrainSample(
        index=index,
        group_index=index,
        tokens=ids,
        prompt_length=PROMPT,
        loss_mask=np.ones(len(zeros), np.int8),
        reward=0.0,
        engine_logprobs=zeros,
        versions=np.zeros(len(zeros), np.int32),
        mask_sum=float(len(zeros)),
        advantages=zeros,
    )


def trained(checkpoint: Path) -> TorchRankWorker:
    """Train model and layer on the rule; the loss of the layer falls with that of the model."""
    settings = TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3, warmup_steps=10)),
        loss=LossSettings(loss_type="sft_loss"),
        capacity=Capacity(max_tokens=8192),
        device="cuda",
        precision="bf16",
        takes_images=False,
        engine_format=EngineFormat(experts=experts_in(checkpoint)),
        has_mtp=True,
        mtp=MTPTraining(1.0, is_joint=False),
    )
    worker = TorchRankWorker(settings, World(device=torch.device("cuda")))
    rng, losses = np.random.default_rng(0), []
    for _ in range(NUM_STEPS):
        samples = [sample(index, sequence(int(seed))) for index, seed in enumerate(rng.integers(0, VOCABULARY, 32))]
        metrics = worker.train(shares.to_train(worker, train_batches.batch(samples))).metrics
        losses.append((round(metrics["train/loss"], 3), round(metrics["train/mtp_loss"], 3)))
    print(f"losses of model and layer: {losses[::10]}, last {losses[-1]}", flush=True)
    assert losses[-1][0] < 0.3 and losses[-1][1] < 0.3, "or drafts could not be accepted"
    return worker


async def sampled(client: EngineClient) -> list[Generation]:
    params = SamplingParams(max_new_tokens=64, temperature=1.0, ignore_eos=True)
    prompts = [sequence(seed)[:PROMPT] for seed in range(16)]
    return list(await asyncio.gather(*(client.generate(ids, params, rid=f"sampled-{n}") for n, ids in enumerate(prompts))))


def accepted(generations: list[Generation]) -> float:
    """Return tokens per forward pass that verified drafts."""
    return sum(len(each.output_ids) for each in generations) / sum(each.num_verifications for each in generations)


async def test_drafts_of_a_trained_layer_are_accepted_once_it_is_sent(tmp_path: Path) -> None:
    checkpoint = FAMILY.save(tmp_path / "model", "qwen3_next", device="cpu", dtype=torch.bfloat16)
    tiny_mtp.add_mtp(checkpoint, dtype=torch.bfloat16)
    worker = trained(checkpoint)
    with PortClaims() as claims:
        settings = server_settings(
            "engine",
            checkpoint,
            claims,
            tmp_path / "engine.txt",
            device="cuda",
            arguments=ARGUMENTS,
            environment={"PYTHONPATH": os.environ.get("FULIGO_SGLANG_PYTHONPATH", "")},
        )
        server = SGLangServer(settings)
        client = EngineClient(server.url, settings.keys, timeout_s=240.0)
        try:
            await server.wait_ready()
            found: list[float] = []
            for version, left_out in ((1, (MTP_PREFIX,)), (2, ())):
                sender = WeightSender(EngineFormat(experts=experts_in(checkpoint), left_out=left_out))
                target = WeightTarget("tensor", version, 512 << 20, engines=(EngineAddress(client.url, keys=settings.keys),))
                await client.pause("abort")
                manifest = await asyncio.to_thread(sender.send, worker.named_weights(), target)
                assert isinstance(manifest, WeightManifest), manifest
                await client.resume()
                generations = await sampled(client)
                found.append(accepted(generations))
                samples = [sample(n, np.concatenate([sequence(n)[:PROMPT], each.output_ids])) for n, each in enumerate(generations)]
                scores = worker.logprobs(shares.to_score(worker, samples))
                assert scores is not None
                difference = np.abs(np.concatenate(scores) - np.concatenate([each.logprobs for each in generations])).mean()
                print(f"version {version}: {found[-1]:.2f} tokens per verification; scores differ by {difference:.2e} nats")
                assert difference < 0.1
        finally:
            await client.close()
            await server.stop()
    with_random_layer, with_trained_layer = found
    assert with_random_layer < 1.5
    assert with_trained_layer > 1.8, "nearly all first drafts are right"
