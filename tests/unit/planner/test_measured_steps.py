"""Planned seconds of whole steps against measured ones (docs/benchmarks-gpu.md, docs/real-runs.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from fuligo.config.command_line import parse
from fuligo.models.adapter_names import adapter_of
from fuligo.models.registry import architecture_of
from fuligo.planner import lengths
from fuligo.planner.choices import choose
from fuligo.planner.estimate import estimate
from fuligo.planner.gpus import gpu
from fuligo.planner.roofline import assumptions
from fuligo.planner.subject import Assumed, Subject
from tests.unit.planner.subjects import CPU_ADAM, FULL
from tests.unit.planner.test_measured import config_json

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip

RUN = "--hf-checkpoint model --prompt-data prompts.jsonl --rm-type random --launcher local --device cuda --num-rollout 6 --precision bf16 \
  --rollout-backend sglang --sglang-attention-backend triton --sglang-sampling-backend pytorch"
SMALL = "--rollout-batch-size 64 --n-samples-per-prompt 16 --rollout-max-response-len 320 --colocate --actor-num-gpus-per-node 1"
ROWS_8K = "--use-dynamic-batch-size --max-tokens-per-gpu 8192"
QUICKSTART = "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 512 --rollout-max-prompt-len 64 \
  --use-dynamic-batch-size"
ROWS = "--rollout-batch-size 32 --n-samples-per-prompt 4 --rollout-max-prompt-len 64 --rollout-max-response-len 448 --share-prefixes off \
  --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --use-dynamic-batch-size --max-tokens-per-gpu"
"""As many tokens as the optimizer step of `benchmarks/training.py torch-small`."""
MEGATRON_8K = f"{QUICKSTART} --max-tokens-per-gpu 8192 --train-backend megatron"
MEGATRON_12K = f"{QUICKSTART} --max-tokens-per-gpu 12288 --train-backend megatron"
WHOLE_WAVE = "--debug-rollout-only --n-samples-per-prompt 16 --rollout-max-response-len 512 --rollout-max-prompt-len 105"
FIXED_320 = "--rollout-batch-size 32 --n-samples-per-prompt 16 --rollout-max-response-len 320 --rollout-max-prompt-len 100 --colocate"
GSM8K = "--rollout-max-prompt-len 512 --over-sampling-batch-size 96 --sglang-mem-fraction-static 0.15 --use-dynamic-batch-size \
  --max-tokens-per-gpu 16384 --dynamic-sampling-filter-path fuligo.rollout.filters.check_reward_nonzero_std"
LORA_MOE = "--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 512 --rollout-max-prompt-len 64 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --train-backend torch --colocate --actor-num-gpus-per-node 1 --lora-rank 16 --lr 1e-5 \
  --sglang-mem-fraction-static 0.6"
GLM_FLASH = f"{QUICKSTART} --max-tokens-per-gpu 9216 --train-backend megatron --colocate --offload-train --actor-num-gpus-per-node 4 \
  --rollout-num-gpus-per-engine 4 --use-kl-loss --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 \
  --moe-token-dispatcher-type alltoall {FULL} {CPU_ADAM} --mtp-num-layers 1 --enable-mtp-training --sglang-mem-fraction-static 0.7 \
  --sglang-enable-dp-attention --sglang-dp-size 4 --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1 \
  --sglang-max-running-requests 256 --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 \
  --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 3"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Run whose steps after the first were timed."""

    model: str
    num_layers: int
    gpu: str
    flags: str
    seconds: Mapping[str, tuple[float, float]]
    """Shortest and longest time of each phase; `train` includes the optimizer step, `score` the onload of the trainer, as in `perf/*`."""
    response_share: float = 1.0
    """Mean length of the responses relative to the longest; models with random weights never end before it."""
    factor: float = 1.5
    """Largest ratio of planned and measured time."""
    assumed: Assumed = field(default_factory=Assumed)


MEASURED = {
    "smollm2": MeasuredStep(
        "smollm2", 30, "h200-141", f"{SMALL} {ROWS_8K} --rollout-max-prompt-len 40 --share-prefixes off",
        {"rollout": (2.2, 3.7), "train": (2.1, 2.9), "step": (5.3, 7.0)}, 116 / 320,
    ),
    "smollm2, layers not compiled": MeasuredStep(
        "smollm2", 30, "h200-141", f"{SMALL} {ROWS_8K} --rollout-max-prompt-len 40 --share-prefixes off --no-torch-compile",
        {"train": (4.0, 4.6)}, 116 / 320,
    ),
    "smollm2, long rows": MeasuredStep(  # three runs shared the GPU
        "smollm2", 30, "h200-141",
        f"{SMALL} --use-dynamic-batch-size --max-tokens-per-gpu 24576 --rollout-max-prompt-len 40 --share-prefixes off",
        {"train": (1.5, 1.9)}, 116 / 320,
    ),
    "smollm2, race with TRL": MeasuredStep(
        "smollm2", 30, "h100-80", f"{SMALL} {ROWS_8K} --rollout-max-prompt-len 40 --share-prefixes off",
        {"rollout": (2.3, 3.0), "train": (2.3, 2.9)}, 84 / 320,
    ),
    "smollm2, tokens drawn in one pass": MeasuredStep(
        "smollm2", 30, "h200-141",
        "--debug-rollout-only --rollout-batch-size 64 --n-samples-per-prompt 16 --rollout-max-response-len 320 --rollout-num-gpus 1"
        " --rollout-max-prompt-len 40", {"rollout": (2.6, 3.1)}, 107 / 320,
    ),
    "smollm2, questions of GSM8K": MeasuredStep(
        "smollm2", 30, "h200-141", f"{SMALL} {ROWS_8K} --rollout-max-prompt-len 105 --share-prefixes off --no-torch-compile",
        {"rollout": (3.5, 4.0), "train": (6.1, 7.4)}, 254 / 320,
    ),
    "smollm2, half of the groups dropped": MeasuredStep("smollm2", 30, "h100-80", f"{SMALL} {GSM8K}", {"step": (8.0, 11.0)}, 0.5),
    "4B, rollout only, H200": MeasuredStep(
        "qwen3-4b", 36, "h200-141", f"{WHOLE_WAVE} --rollout-batch-size 64 --rollout-num-gpus 1", {"rollout": (20.3, 21.8)}
    ),
    "4B, rollout only, H100": MeasuredStep(
        "qwen3-4b", 36, "h100-80", f"{WHOLE_WAVE} --rollout-batch-size 64 --rollout-num-gpus 1", {"rollout": (26.1, 26.1)}
    ),
    "4B, rollout only, two engines": MeasuredStep(
        "qwen3-4b", 36, "h100-80", f"{WHOLE_WAVE} --rollout-batch-size 128 --rollout-num-gpus 2", {"rollout": (26.1, 27.4)}
    ),
    "0.6B, Megatron": MeasuredStep(  # training was timed before passes over logits were compiled
        "qwen3-0.6b", 28, "h200-141",
        f"{QUICKSTART} --max-tokens-per-gpu 16384 --train-backend megatron --colocate --actor-num-gpus-per-node 1 --use-tis",
        {"rollout": (3.5, 3.9)},
    ),
    "0.6B, torch": MeasuredStep(
        "qwen3-0.6b", 28, "h200-141",
        f"{QUICKSTART} --max-tokens-per-gpu 16384 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --no-torch-compile",
        {"rollout": (3.1, 3.3), "train": (3.1, 3.1)},
    ),
    "0.6B, torch, rows of 8,192": MeasuredStep("qwen3-0.6b", 28, "h200-141", f"{ROWS} 8192", {"train": (1.79, 1.79)}),
    "0.6B, torch, rows of 16,384": MeasuredStep("qwen3-0.6b", 28, "h200-141", f"{ROWS} 16384", {"train": (0.88, 0.93)}),
    "0.6B, torch, rows of 32,768": MeasuredStep("qwen3-0.6b", 28, "h200-141", f"{ROWS} 32768", {"train": (0.84, 0.84)}),
    "0.6B, FSDP on two of four H100s": MeasuredStep(
        "qwen3-0.6b", 28, "h100-80",
        f"--rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 1024 --rollout-max-prompt-len 30 {ROWS_8K} "
        "--share-prefixes off --actor-num-gpus-per-node 2 --rollout-num-gpus 2",
        {"rollout": (4.2, 4.2), "train": (1.5, 1.5)}, 300 / 1024,
    ),
    "4B, colocated": MeasuredStep(
        "qwen3-4b", 36, "h200-141", f"{MEGATRON_8K} --colocate --offload-train --actor-num-gpus-per-node 1",
        {"rollout": (5.4, 5.7), "train": (6.9, 7.1), "onload": (1.27, 1.32), "offload": (1.25, 1.43), "step": (15.0, 15.8)},
    ),
    "4B, colocated, stays": MeasuredStep(
        "qwen3-4b", 36, "h200-141", f"{MEGATRON_8K} --colocate --actor-num-gpus-per-node 1",
        {"rollout": (5.2, 5.4), "train": (7.0, 7.0), "step": (12.7, 12.8)},
    ),
    "4B, colocated, stays, rows of 12k, tokens drawn in one pass": MeasuredStep(
        "qwen3-4b", 36, "h200-141", f"{MEGATRON_12K} --colocate --actor-num-gpus-per-node 1",
        {"rollout": (5.0, 5.1), "train": (6.7, 6.8), "step": (12.2, 12.3)},
    ),
    "the same in FP8": MeasuredStep(
        "qwen3-4b", 36, "h200-141", f"{MEGATRON_12K} --colocate --actor-num-gpus-per-node 1 --fp8-format e4m3 --fp8-recipe blockwise",
        {"rollout": (5.0, 5.1), "train": (5.7, 5.8), "step": (11.2, 11.2)},
    ),
    "4B, two H200s": MeasuredStep(
        "qwen3-4b", 36, "h200-141", f"{MEGATRON_8K} --actor-num-gpus-per-node 1 --rollout-num-gpus 1",
        {"rollout": (5.3, 5.7), "train": (7.1, 7.2), "step": (12.6, 13.1)},
    ),
    "4B, four H200s": MeasuredStep(
        "qwen3-4b", 36, "h200-141",
        f"{MEGATRON_8K} --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --tensor-model-parallel-size 2 --sequence-parallel",
        {"step": (9.8, 10.3)},
    ),
    "4B, four H100s": MeasuredStep(
        "qwen3-4b", 36, "h100-80", f"{MEGATRON_8K} --rollout-batch-size 64 --actor-num-gpus-per-node 2 --rollout-num-gpus 2",
        {"rollout": (6.1, 8.3), "train": (8.7, 8.7), "step": (15.0, 17.1)},
    ),
    "4B, FSDP on two H100s": MeasuredStep(
        "qwen3-4b", 36, "h100-80", f"{FIXED_320} --actor-num-gpus-per-node 2 --gradient-checkpointing",
        {"rollout": (4.1, 4.5), "train": (7.5, 8.0), "step": (13.6, 14.0)},
    ),
    "4B, torch on one H200": MeasuredStep(
        "qwen3-4b", 36, "h200-141", f"{FIXED_320} --actor-num-gpus-per-node 1",
        {"rollout": (6.2, 6.5), "train": (10.2, 10.3), "step": (19.0, 19.4)},
    ),
    "30B-A3B, 16 layers, LoRA": MeasuredStep(
        "qwen3-30b-a3b", 16, "h100-80", LORA_MOE, {"rollout": (3.4, 3.4), "train": (2.6, 2.8), "step": (8.3, 8.3)}, factor=1.9
    ),
    "GLM-4.7-Flash, 8 layers, no draft accepted": MeasuredStep(
        "glm4.7-flash", 8, "h100-80", GLM_FLASH, {"rollout": (8.0, 8.6), "score": (1.5, 2.7), "train": (3.7, 6.5)},
        factor=2.0, assumed=Assumed(accept_length=1.002),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEASURED)
def test_phases_take_about_as_long_as_measured(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MEASURED[case]
    monkeypatch.setattr(lengths, "AVERAGE_OF_LONGEST", run.response_share)
    planned = planned_seconds(subject_of(run))
    for name, (shortest, longest) in run.seconds.items():
        assert shortest / run.factor <= planned[name] <= longest * run.factor, f"{name}: planned {planned[name]:.2f} s"


def test_the_plan_states_the_tokens_of_a_verification() -> None:
    measured = subject_of(MEASURED["GLM-4.7-Flash, 8 layers, no draft accepted"])
    assumed = replace(measured, assumed=Assumed())
    texts = [" ".join(assumptions(subject, estimate(subject).layout)) for subject in (measured, assumed)]
    assert "sample 1.00 tokens per verification of drafts (--accept-length)." in texts[0]
    assert (
        "sample 2.57 tokens per verification" in texts[1] and "each of the 2 drafts in a row is accepted with probability 0.85" in texts[1]
    )


def subject_of(run: MeasuredStep) -> Subject:
    values = dict(SMOLLM2 if run.model == "smollm2" else config_json(run.model), num_hidden_layers=run.num_layers)
    if run.model == "glm4.7-flash":
        values["mlp_layer_types"] = ["dense"] + ["sparse"] * (run.num_layers - 1)
    config, shapes = parse([*RUN.split(), *run.flags.split()]).config, architecture_of(values)
    subject = Subject(config, shapes, shapes, gpu(run.gpu), adapter_config=adapter_of(config), assumed=run.assumed)
    return choose(subject)[0]


def planned_seconds(subject: Subject) -> dict[str, float]:
    plan = estimate(subject)
    seconds = {phase.name: phase.duration_s for phase in plan.phases}
    seconds["train"] = seconds.get("train", 0.0) + seconds.get("optimizer", 0.0)
    seconds["score"] = seconds.get("score", 0.0) + seconds.get("onload", 0.0)
    return {**seconds, "step": plan.step_s}
