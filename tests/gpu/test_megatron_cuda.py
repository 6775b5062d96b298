"""The Megatron trainer with TransformerEngine's layers on GPUs: transformers' log-probabilities, and the same under every layout."""

import gc
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.config.command_line import parse
from fuligo.formats.weight_manifest import WeightTarget
from fuligo.job.trainer_settings import trainer_settings
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.types import FloatArray, TrainBatch
from tests import tiny, train_batches

pytest.importorskip("transformer_engine")
pytest.importorskip("megatron.core")

LENGTHS = [(4, 90), (1, 3), (60, 9), (2, 1), (5, 140), (3, 90), (7, 6), (8, 20)]
LATENT = {
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {"head_dim": 64},
    "llama": {},
    "qwen2": {},
    "glm4": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "glm4_moe": {"head_dim": 64, "first_k_dense_replace": 1, **EXPERTS},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], **LATENT, **EXPERTS},
    "gemma3_text": {"head_dim": 64, "sliding_window": 24},
    "glm_moe_dsa": {
        "first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full", "shared"],
        "indexer_rope_interleave": Version(transformers.__version__) >= Version("5.13"),  # as their class does, which does not read it
        "index_n_heads": 8, "index_head_dim": 128, "index_topk": 32, **LATENT, **EXPERTS,
    },
}  # fmt: skip
LORA = ("--lora-rank", "8", "--lora-alpha", "16")
FP8 = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
MIXTURES = ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
SPARSE = ("glm_moe_dsa",)
ALLTOALL = ("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp2": (),
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "pp2-vpp2": ("--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "2"),
    "cp2": ("--context-parallel-size", "2"),
    "ep2": ("--expert-model-parallel-size", "2"),
    "tp2-ep2": (
        "--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2",
        "--expert-tensor-parallel-size", "1",
    ),
}  # fmt: skip


def save(directory: Path, family: str) -> Path:
    """Save weights as small as those of trained models: in bfloat16 a sharp random model would drown in rounding."""
    return tiny.save_checkpoint(directory, family, hidden=256, layers=4, initializer_range=0.05, **FAMILIES[family])


@asynccontextmanager
async def trainer(checkpoint: Path, *flags: str, num_ranks: int = 1) -> AsyncIterator[LocalTrainer]:
    words = (
        "--train-backend", "megatron", "--hf-checkpoint", str(checkpoint), "--prompt-data", "unused.jsonl", "--rm-type", "random",
        "--actor-num-gpus-per-node", str(num_ranks), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "256", "--precision", "bf16",
        "--device", "cuda", "--num-rollout", "4", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--lr", "1e-3",
        "--rollout-num-gpus", "1", "--launcher", "local", "--rollout-max-response-len", "256", "--accumulate-allreduce-grads-in-fp32",
    )  # fmt: skip
    config = parse([*words, *flags]).config
    settings = trainer_settings(config, "cuda", initial_weights=checkpoint, num_rollout=4)
    assert isinstance(settings, MegatronTrainerSettings)
    trainer = LocalTrainer(settings)
    try:
        await trainer.load()
        yield trainer
    finally:
        await trainer.close()


def reference_logprobs(checkpoint: Path, samples: Sequence) -> list[FloatArray]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs = []
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            log_softmax = model(ids[None]).logits[0].float().log_softmax(-1)
        logprobs.append(log_softmax[:-1].gather(1, ids[1:, None])[sample.prompt_length - 1 :, 0].numpy())
    return logprobs


def assert_near(got: Sequence[FloatArray], expected: Sequence[FloatArray], *, mean: float, largest: float) -> None:
    difference = np.abs(np.concatenate(got) - np.concatenate(expected))
    assert difference.mean() <= mean, f"mean {difference.mean():.4f}, largest {difference.max():.4f}"
    assert difference.max() <= largest, f"mean {difference.mean():.4f}, largest {difference.max():.4f}"


def num_parameters(checkpoint: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(checkpoint / "model.safetensors").values())


def family_flags(family: str) -> tuple[str, ...]:
    return ALLTOALL if family in MIXTURES else ()


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = save(tmp_path / "model", family)
    samples = train_batches.samples(LENGTHS)
    async with trainer(checkpoint, *family_flags(family)) as megatron:
        got = await megatron.logprobs(samples)
    # Near a tie, routers in bfloat16 and in float32 send a token to different experts: single tokens are further off.
    largest = 1.0 if family in MIXTURES else 0.15
    mean = 0.03
    if family in SPARSE:  # so do indexers near a tie; on a CPU, in bfloat16, the mean is 0.05 and the largest 1.0
        mean, largest = 0.1, 2.0
    assert_near(got, reference_logprobs(checkpoint, samples), mean=mean, largest=largest)


async def trained(
    checkpoint: Path, family: str, batch: TrainBatch, flags: Sequence[str], num_ranks: int = 1
) -> tuple[list[FloatArray], dict[str, float], list[FloatArray]]:
    """Return log-probabilities before a step, the step's metrics, and log-probabilities after it."""
    async with trainer(checkpoint, *family_flags(family), *flags, num_ranks=num_ranks) as megatron:
        before = await megatron.logprobs(batch.samples)
        result = await megatron.train(batch)
        return before, result.metrics, await megatron.logprobs(batch.samples)


async def assert_trains_the_same(
    checkpoint: Path, family: str, batch: TrainBatch, one: Sequence[str], other: Sequence[str], *, num_ranks: int
) -> None:
    """Compare a step of one rank under the flags `one` with that of `num_ranks` under `other`."""
    one_before, one_metrics, one_after = await trained(checkpoint, family, batch, one)
    two_before, two_metrics, two_after = await trained(checkpoint, family, batch, other, num_ranks)
    is_fp8 = "--fp8-format" in one  # Several ranks quantize different blocks than one does, so layouts differ by FP8's rounding.
    largest = 1.0 if family in MIXTURES or is_fp8 else 0.2
    assert_near(two_before, one_before, mean=0.2 if is_fp8 else 0.02, largest=largest)
    assert two_metrics["train/grad_norm"] == pytest.approx(one_metrics["train/grad_norm"], rel=0.1 if is_fp8 else 0.03)
    assert two_metrics["train/pg_loss"] == pytest.approx(one_metrics["train/pg_loss"], rel=0.03, abs=2e-3)
    changed = np.abs(np.concatenate(one_after) - np.concatenate(one_before)).mean()
    assert_near(two_after, one_after, mean=max(0.2 if is_fp8 else 0.03, 0.1 * float(changed)), largest=2 * largest)


def case_id(value: object) -> str | None:
    """Return the id of a case's flags, by which `-k adapter` selects those with LoRA."""
    if not isinstance(value, tuple):
        return None
    return "all" if not value else "fp8" if value == FP8 else "adapter-experts" if "--lora-experts" in value else "adapter"


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@pytest.mark.parametrize(
    ("family", "layout", "flags"),
    [
        ("qwen3", "dp2", ()), ("qwen3", "tp2", ()), ("qwen3", "pp2", ()), ("qwen3", "pp2-vpp2", ()), ("qwen3", "cp2", ()),
        ("glm4", "tp2", ()), ("qwen3_moe", "ep2", ()), ("qwen3_moe", "tp2-ep2", ()), ("glm4_moe_lite", "tp2", ()),
        ("glm4_moe_lite", "pp2", ()), ("glm4_moe_lite", "cp2", ()), ("gemma3_text", "cp2", ()),
        ("qwen3", "tp2", LORA), ("qwen3_moe", "ep2", LORA), ("qwen3_moe", "tp2-ep2", LORA), ("qwen3_moe", "pp2-vpp2", LORA),
        ("qwen3_moe", "ep2", (*LORA, "--lora-experts")), ("qwen3", "tp2", FP8), ("qwen3", "cp2", FP8), ("qwen3_moe", "tp2-ep2", FP8),
    ],
    ids=case_id,
)  # fmt: skip
async def test_two_gpus_train_as_one(tmp_path: Path, family: str, layout: str, flags: tuple[str, ...]) -> None:
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    checkpoint = save(tmp_path / "model", family)
    await assert_trains_the_same(checkpoint, family, batch, flags, (*flags, *LAYOUTS[layout]), num_ranks=2)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", None), ("qwen3_moe", None), ("gemma3_text", None),
        pytest.param("qwen3", "tp2", marks=two_gpus), pytest.param("qwen3", "cp2", marks=two_gpus),
    ],
)  # fmt: skip
async def test_shared_prefixes_change_nothing(tmp_path: Path, family: str, layout: str | None) -> None:
    """Four groups of two samples; a group's samples have the same prompt of 90 tokens."""
    samples = train_batches.samples([(90, response) for _, response in LENGTHS])
    prompts = {one.group_index: one.tokens[:90] for one in samples}
    batch = train_batches.batch([replace(one, tokens=np.concatenate([prompts[one.group_index], one.tokens[90:]])) for one in samples])
    flags = () if layout is None else LAYOUTS[layout]
    checkpoint = save(tmp_path / "model", family)
    await assert_trains_the_same(checkpoint, family, batch, (), (*flags, "--share-prefixes", "on"), num_ranks=1 if layout is None else 2)


async def test_engines_receive_the_weights_that_were_loaded(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model", "qwen3")
    (tmp_path / "sent").mkdir()
    async with trainer(checkpoint) as megatron:
        target = WeightTarget("disk", version=1, bucket_bytes=2**20, directory=str(tmp_path / "sent"))
        await megatron.send_weights(target)
    loaded = load_file(checkpoint / "model.safetensors")
    sent: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "sent").glob("*.safetensors"):
        sent |= load_file(file)
    assert sent.keys() == loaded.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(sent[name], tensor.to(sent[name].dtype), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "flags"),
    [("qwen3", ()), ("qwen3_moe", ()), ("glm4_moe_lite", ()), ("gemma3_text", ()), ("qwen3_moe", ("--lora-experts",))],
    ids=["qwen3", "qwen3_moe", "glm4_moe_lite", "gemma3_text", "qwen3_moe-experts"],
)
async def test_an_adapter_trains_and_its_merged_weights_say_the_same(tmp_path: Path, family: str, flags: tuple[str, ...]) -> None:
    """The trainer's log-probabilities after two steps are those of transformers with the merged weights that engines get."""
    checkpoint = save(tmp_path / "model", family)
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    merged = tmp_path / "merged"
    merged.mkdir()
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, merged)
    async with trainer(checkpoint, *family_flags(family), *LORA, *flags, "--lr", "2e-2") as megatron:
        before = await megatron.logprobs(batch.samples)
        for _ in range(2):
            metrics = (await megatron.train(batch)).metrics
        after = await megatron.logprobs(batch.samples)
        await megatron.send_weights(WeightTarget("disk", version=1, bucket_bytes=2**30, directory=str(merged)))
    assert metrics["train/grad_norm"] > 0
    changed = np.abs(np.concatenate(after) - np.concatenate(before)).mean()
    assert changed > 0.1, "else bfloat16 hides what the adapter does"
    expected = reference_logprobs(merged, batch.samples)
    assert_near(after, expected, mean=min(0.05, 0.3 * float(changed)), largest=1.5 if family in MIXTURES else 0.5)


FP8_CASES = [
    *(("qwen3", recipe) for recipe in ("blockwise", "tensorwise")),
    *((family, "blockwise") for family in ("glm4", "gemma3_text", "qwen3_moe", "glm4_moe", "glm4_moe_lite")),
]


@pytest.mark.parametrize(("family", "recipe"), FP8_CASES)
async def test_fp8_trains_as_bf16_with_coarser_products(tmp_path: Path, family: str, recipe: str) -> None:
    """The second pass shows that layers quantize the weights after the step, not those before it."""
    checkpoint, batch = save(tmp_path / "model", family), train_batches.batch(train_batches.samples(LENGTHS))
    before, metrics, after = await trained(checkpoint, family, batch, ())
    fp8_before, fp8_metrics, fp8_after = await trained(checkpoint, family, batch, (*FP8[:3], recipe))
    expected = reference_logprobs(checkpoint, batch.samples)
    fine, coarse, changed = (mean_difference(one, other) for one, other in ((before, expected), (fp8_before, expected), (after, before)))
    assert 1.5 * fine < coarse < 0.25, f"{fine:.4f} in bf16, {coarse:.4f} in FP8"
    assert fp8_metrics["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=0.1)
    assert mean_difference(fp8_after, after) < 0.5 * changed, f"a step changes {changed:.4f}"


def mean_difference(one: Sequence[FloatArray], other: Sequence[FloatArray]) -> float:
    return float(np.abs(np.concatenate(one) - np.concatenate(other)).mean())


@pytest.mark.parametrize("flags", [(), FP8], ids=case_id)
async def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, flags: tuple[str, ...]) -> None:
    checkpoint = save(tmp_path / "model", "qwen3")
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    async with trainer(checkpoint, *flags) as megatron:
        await megatron.train(batch)
        await megatron.save(tmp_path / "saved")
        await megatron.train(batch)
        expected = await megatron.logprobs(batch.samples)
    async with trainer(checkpoint, *flags) as megatron:
        await megatron.restore(tmp_path / "saved")
        await megatron.train(batch)
        got = await megatron.logprobs(batch.samples)
    assert_near(got, expected, mean=1e-4, largest=1e-2)


async def rollout_of_ppo(megatron: LocalTrainer) -> tuple[dict[str, float], list[FloatArray]]:
    """Run a rollout of PPO; return its metrics, and the values that it began with."""
    scored = await megatron.score(train_batches.samples(LENGTHS))
    values = [sample.values for sample in scored if sample.values is not None]
    settings = AdvantageSettings(samples_per_step=len(scored), estimator="ppo")
    return (await megatron.train(assign_advantages(scored, settings))).metrics, values


async def test_a_value_model_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model", "qwen3")
    flags = ("--advantage-estimator", "ppo", "--critic-lr", "1e-3")
    async with trainer(checkpoint, *flags) as megatron:
        first, values = await rollout_of_ppo(megatron)
        assert not np.concatenate(values).any(), "its head begins as zeros"
        await megatron.save(tmp_path / "saved")
        metrics, expected = await rollout_of_ppo(megatron)
    assert metrics["train/value_loss"] < first["train/value_loss"]
    async with trainer(checkpoint, *flags) as megatron:
        await megatron.restore(tmp_path / "saved")
        await megatron.offload()
        await megatron.onload()
        again, got = await rollout_of_ppo(megatron)
    assert_near(got, expected, mean=1e-4, largest=1e-2)
    assert again["train/critic_grad_norm"] == pytest.approx(metrics["train/critic_grad_norm"], rel=1e-2)


@pytest.mark.parametrize("flags", [(), FP8], ids=case_id)
async def test_offload_and_onload_restore_the_state(tmp_path: Path, flags: tuple[str, ...]) -> None:
    checkpoint = save(tmp_path / "model", "qwen3")
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    async with trainer(checkpoint, *flags) as megatron:
        await megatron.train(batch)
        before = await megatron.logprobs(batch.samples)
        held = torch.cuda.memory_allocated()
        await megatron.offload()
        freed = held - torch.cuda.memory_allocated()
        assert freed > 17 * num_parameters(checkpoint)  # weights 2 bytes, gradients 4, optimizer 12
        await megatron.onload()
        after = await megatron.logprobs(batch.samples)
        await megatron.train(batch)
    assert_near(after, before, mean=0, largest=0)


@pytest.mark.parametrize("flags", [(), ("--use-precision-aware-optimizer",)], ids=["default", "precision-aware"])
async def test_a_trainer_that_stays_on_the_device_trains_as_one_that_leaves_it(tmp_path: Path, flags: tuple[str, ...]) -> None:
    checkpoint = save(tmp_path / "model", "qwen3")
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    found = []
    for place in ("--offload-train", "--no-offload-train"):
        async with trainer(checkpoint, "--colocate", place, *flags) as megatron:
            await megatron.offload()
            await megatron.onload()
            started = torch.cuda.memory_allocated()
            await megatron.train(batch)
            grown = torch.cuda.memory_allocated() - started
            gc.collect()
            trained = torch.cuda.memory_allocated()
            await megatron.offload()
            freed = trained - torch.cuda.memory_allocated()
            await megatron.onload()
            metrics = (await megatron.train(batch)).metrics
            found.append((await megatron.logprobs(batch.samples), metrics["train/grad_norm"], grown, freed))
    (away, away_norm, first_grown, freed), (stayed, stayed_norm, grown, freed_staying) = found
    assert_near(stayed, away, mean=1e-4, largest=1e-2)
    assert stayed_norm == pytest.approx(away_norm, rel=1e-2)
    size = num_parameters(checkpoint)
    assert first_grown > 7 * size > 4 * size > grown, "the moments exist before the first step"
    assert freed - freed_staying > (11 if flags else 13) * size, "weights and optimizer state stay"
