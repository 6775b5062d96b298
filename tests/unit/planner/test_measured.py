"""Plans of the trainers against measured runs (`benchmarks/training.py`, H200s): memory and speed."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fuligo.config.command_line import parse
from fuligo.layout.megatron import layout_of
from fuligo.models.registry import architecture_of
from fuligo.planner.gpus import GIB, gpu
from fuligo.planner.layout import make_layout
from fuligo.planner.memory.bars import memory_bars
from fuligo.planner.plan import MemoryBar, MemoryItem
from fuligo.planner.subject import Subject
from fuligo.planner.training_time import trainer_efficiency
from tests.unit.planner.subjects import CPU_ADAM, EXAMPLES

TOLERANCE = 0.10
TOO_LOW = 0.01
"""Largest excess of a run over its plan; a plan that is too low admits runs that fail."""
BESIDE_TENSORS = {"fragmentation", "communication", "runtime"}

ALLTOALL = "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion"
FLAGS = "--hf-checkpoint model --prompt-data prompts.jsonl --rm-type random --launcher local --device cuda \
  --use-dynamic-batch-size --num-rollout 10 --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 4096 \
  --rollout-max-prompt-len 512"
MEGATRON = "--train-backend megatron --accumulate-allreduce-grads-in-fp32"
TORCH = "--train-backend torch --precision bf16 --torch-compile"
QWEN3_600M = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}  # fmt: skip

PUBLISHED = {"qwen3-30b-a3b": QWEN3_30B, "qwen3-0.6b": QWEN3_600M}


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured run; memory of the fullest rank of each pipeline stage."""

    model: str
    num_layers: int
    num_gpus: int
    max_tokens: int
    """Tokens of the longest row on a context-parallel rank."""
    flags: str
    peak_gib: tuple[float, ...]
    """Peak memory of the process on the GPU."""
    tensors_gib: tuple[float, ...]
    """Peak memory of tensors."""
    tflops: float | None = None
    """FLOP/s of a GPU, without the pipeline's bubble; None where the step is bound by something that the plan counts apart, or by memory,
    or was measured before the trainer had most of its speed."""
    separate_passes: bool = False
    """The run's code computed logits in separate passes, which needed one more fp32 tensor per chunk than today's."""
    trainer: str = MEGATRON


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP2_EP2 = f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {ALLTOALL}"
TP2_EP4 = TP2_EP2.replace("expert-model-parallel-size 2", "expert-model-parallel-size 4")
EP2 = f"--expert-model-parallel-size 2 {ALLTOALL}"
RECOMPUTATION = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise"
OLD = True
"""Replacement of `separate_passes`."""
MEASURED = {
    "dense": Measured("qwen3-4b", 36, 1, 10686, "", (123.28,), (112.26,), 491),
    "dense-recompute": Measured("qwen3-4b", 36, 1, 13291, RECOMPUTATION, (82.32,), (74.92,)),
    "dense-cpu-adam": Measured("qwen3-4b", 36, 1, 12288, CPU_ADAM, (84.9,), (75.0,), None, OLD),
    "dense-12": Measured("qwen3-4b", 12, 1, 16384, "", (60.55,), (54.26,), None, OLD),
    "dense-12, now": Measured("qwen3-4b", 12, 1, 13291, "", (55.13,), (48.31,), 477),
    "dense-12, FP8": Measured("qwen3-4b", 12, 1, 13291, FP8, (54.69,), (48.44,), 541),
    "dense-tp2": Measured("qwen3-4b", 36, 2, 16384, TP2, (76.09,), (67.85,), 405, OLD),
    "dense-dp2": Measured("qwen3-4b", 36, 2, 12288, "", (104.91,), (97.52,), None, OLD),
    "dense-dp4": Measured("qwen3-4b", 36, 4, 12288, "", (93.16,), (86.25,), None, OLD),
    "dense-pp2": Measured("qwen3-4b", 36, 2, 7459, PP2, (78.29, 66.56), (65.0, 57.41), 343 / 0.9, OLD),
    "dense-cp2": Measured("qwen3-4b", 36, 2, 6646, CP2, (86.7,), (76.86,), 395, OLD),
    "moe-9": Measured("qwen3-30b-a3b", 9, 1, 16384, ALLTOALL, (134.74,), (127.72,), None, OLD),
    "moe": Measured("qwen3-30b-a3b", 7, 1, 13291, ALLTOALL, (106.61,), (98.69,), 272),
    "moe-ep2": Measured("qwen3-30b-a3b", 7, 2, 13301, EP2, (68.98,), (59.29,), 256),
    "moe-full-ep4": Measured(
        "qwen3-30b-a3b", 48, 4, 7422, f"{TP2_EP4} {RECOMPUTATION} {CPU_ADAM} --optimizer-offload-fraction 0.85", (74.13,), (60.76,)
    ),
    "mla": Measured("glm4.7-flash", 6, 1, 16384, ALLTOALL, (89.42,), (84.58,), 263, OLD),
    "mla-tp2-ep2": Measured("glm4.7-flash", 6, 2, 16384, TP2_EP2, (50.02,), (42.79,), 195, OLD),
    "torch": Measured("qwen3-4b", 36, 1, 10686, "", (119.31,), (106.58,), 450, trainer=TORCH),
    "torch-short": Measured("qwen3-4b", 36, 1, 12190, "", (120.36,), (112.22,), 486, trainer=TORCH),
    "torch-recompute": Measured("qwen3-4b", 36, 1, 13291, "--gradient-checkpointing", (76.97,), (69.69,), trainer=TORCH),
    "torch-small": Measured("qwen3-0.6b", 28, 1, 13291, "", (33.84,), (30.27,), trainer=TORCH),
}
"""Runs by their names in `benchmarks/training.py`; docs/planner-model.md has the same table."""


def subject_of(run: Measured) -> Subject:
    shape = {**config_json(run.model), "num_hidden_layers": run.num_layers}
    sizes = f"--actor-num-gpus-per-node {run.num_gpus} --rollout-num-gpus {run.num_gpus} --max-tokens-per-gpu {run.max_tokens}"
    config = parse([*FLAGS.split(), *sizes.split(), *run.trainer.split(), *run.flags.split()]).config
    return Subject(config, architecture_of(shape), architecture_of(shape), gpu("h200-141"))


def config_json(model: str) -> dict[str, Any]:
    if model in PUBLISHED:
        return PUBLISHED[model]
    return json.loads((EXAMPLES / model / "model" / "config.json").read_text())


def trainer_bars(run: Measured) -> list[MemoryBar]:
    """Return the tensors that today's code, or the run's, needs."""
    subject = subject_of(run)
    bars = [bar for bar in memory_bars(subject, make_layout(subject)) if bar.pipeline_rank is not None]
    if not run.separate_passes:
        return bars
    return [replace(bar, items=tuple(_more(item, 3 / 2) if item.name == "logits" else item for item in bar.items)) for bar in bars]


def _more(item: MemoryItem, factor: float) -> MemoryItem:
    return replace(item, num_bytes=round(item.num_bytes * factor))


@pytest.mark.parametrize("case", MEASURED)
def test_peaks(case: str) -> None:
    run = MEASURED[case]
    for bar, peak in zip(trainer_bars(run), run.peak_gib, strict=True):
        planned = bar.used_bytes / GIB
        assert (1 - TOO_LOW) * peak <= planned <= (1 + TOLERANCE) * peak, f"planned {planned:.1f} GiB, measured {peak:.1f}"


@pytest.mark.parametrize("case", MEASURED)
def test_tensors(case: str) -> None:
    run = MEASURED[case]
    for bar, measured in zip(trainer_bars(run), run.tensors_gib, strict=True):
        planned = sum(item.num_bytes for item in bar.items if item.name not in BESIDE_TENSORS) / GIB
        assert planned == pytest.approx(measured, rel=0.012 if run.trainer == MEGATRON else 0.035)


@pytest.mark.parametrize("case", [case for case, run in MEASURED.items() if run.tflops is not None])
def test_speeds(case: str) -> None:
    subject = subject_of(MEASURED[case])
    planned = trainer_efficiency(subject, layout_of(subject.config)) * subject.gpu.bf16_flops / 1e12
    assert planned == pytest.approx(MEASURED[case].tflops, rel=0.15)
