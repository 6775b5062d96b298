"""Run directory as a run leaves it, with deliberate faults and known numbers.

Twelve steps of four groups of four samples; step k lasts from START_S + 10 k to START_S + 10 k + 10. The same four prompts at every step.
Two engines sample half of the groups each. From step 8 on, one of them has weights one version old, and engine and trainer disagree on
its tokens by half a nat. Two ranks train; the second takes longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import orjson
from tokenizers import Tokenizer

from fuligo.config import Config
from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.samples import Training
from fuligo.types import Sample, SampleGroup, SampleStatus, Span, TokenScores, TrainSample

MODEL = Path(__file__).parents[4] / "fuligo" / "quickstart" / "assets" / "model"
START_S = 1_760_000_000.0
STEP_S = 10.0
NUM_STEPS = 12
NUM_GROUPS = 4
GROUP_SIZE = 4
NUM_RANKS = 2
STALE_FROM = 8
"""First step with tokens of an old version."""
STALE_ENGINE = 1
"""Engine that samples half of the groups and keeps its old weights from then on."""
STALE_DIFF = 0.5
"""Difference in nats between engine and trainer on stale tokens."""
USUAL_DIFF = 0.01
FAILED = (3, 5)
"""Step and row of the sample that failed."""
TRUNCATED = (5, 2)
HOSTILE = (6, 1)
"""Step and row of the sample whose text is a script."""
SCRIPT = "</script><script>window.hacked = true</script><img src=x onerror='window.hacked = true'>\u2028${hacked}"
EVAL_SETS = ("held_out", "long_sums")
PROMPTS = ("What is 3 + 4?", "What is 12 + 9?", "Add 5 and 6.", "Add 70 and 8.")
PHASES = (("rollout", 0.0, 6.0), ("score", 6.0, 6.5), ("train", 6.5, 9.0), ("sync", 9.0, 9.5), ("record", 9.5, 9.9))
"""Phases of every step: name, start, end; the last 0.1 s belong to none."""


def write_run(path: Path, *, num_steps: int = NUM_STEPS, name: str = "recorded", lr: float = 1e-4, num_rollouts: int = NUM_STEPS) -> Path:
    """Write a run that ended after `num_steps` rollouts."""
    config = Config.model_validate(
        {
            "model": {"hf_checkpoint": str(MODEL)},
            "data": {"num_rollout": num_rollouts},
            "optimizer": {"lr": lr},
            "observability": {"name": name},
        }
    )
    run = RunDirectory.create(path, config, resume=False)
    for step in range(num_steps):
        write_step(run, step)
    for num_done, mean in ((0, 0.25), (num_steps, 0.75)):
        write_evaluation(run, num_done, mean)
    run.close()
    return path


def write_step(run: RunDirectory, step: int) -> None:
    """Write samples, trace and metrics in the order of a run."""
    groups = groups_of(step)
    run.write_samples(step, groups, training_of(groups))
    run.trace.samples(step, [sample for group in groups for sample in group.samples])
    run.trace.ranks(step, rank_spans(step))
    append_phases(run.trace.path, step)
    run.record(record_of(step, groups))


def write_evaluation(run: RunDirectory, num_rollouts: int, mean: float) -> None:
    """Write an evaluation of two datasets with one group each, both with the same group index."""
    groups = {name: [SampleGroup(0, 0, [_held_out(at, name, at < 4 * mean) for at in range(4)])] for name in EVAL_SETS}
    run.write_evaluation(num_rollouts, groups, {f"eval/{name}/mean@1": mean for name in EVAL_SETS})


def _held_out(index: int, name: str, right: bool) -> Sample:
    text = f"{name} {index}: \\boxed{{{'7' if right else '0'}}}"
    ids = np.array(tokenizer().encode(text, add_special_tokens=False).ids, np.int32)
    return Sample(
        index=index,
        group_index=0,
        prompt=[{"role": "user", "content": f"{name}: what is 3 + 4?"}],
        prompt_ids=np.arange(5, 15, dtype=np.int32),
        label="7",
        response_ids=ids,
        loss_mask=np.ones(len(ids), np.int8),
        engine_logprobs=np.linspace(-2, -0.1, len(ids)).astype(np.float32),
        versions=np.zeros(len(ids), np.int32),
        status=SampleStatus.COMPLETED,
        finish_reason="stop",
        reward=float(right),
        response=text,
    )


def rank_spans(step: int) -> list[list[Span]]:
    """Write the spans of two ranks; rank 1 sends no weights."""
    start = START_S + STEP_S * step
    computed = [
        [
            Span("score", start + 6.0, start + 6.4),
            Span("forward, backward", start + 6.5, start + 8.0 + 0.5 * rank),
            Span("optimizer", start + 8.5, start + 8.9),
        ]
        for rank in range(NUM_RANKS)
    ]
    return [[*([Span("send", start - 1.0, start - 0.5)] if step else []), *computed[0]], *computed[1:]]


def append_phases(path: Path, step: int) -> None:
    """Write the phases of a step at known times."""
    start = START_S + STEP_S * step
    with path.open("ab") as file:
        for name, begin, end in PHASES:
            event = {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": 0,
                "ts": (start + begin) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": {"step": step},
            }
            file.write(orjson.dumps(event) + b",\n")


def record_of(step: int, groups: list[SampleGroup]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if isinstance(sample.reward, float)]
    return {
        "step": step,
        "policy_version": step + 1,
        "time": START_S + STEP_S * (step + 1),
        "rollout/reward_mean": sum(rewards) / len(rewards),
        "rollout/response_len_mean": float(np.mean([len(sample.response_ids) for sample in samples])),
        "rollout/num_tokens": float(sum(len(sample.response_ids) for sample in samples)),
        "rollout/num_failed": float(step == FAILED[0]),
        "rollout/tokens_per_s": 20.0,
        "train/loss": 0.1 / (step + 1),
        "train/entropy": 0.5 - 0.01 * step,
        "train/grad_norm": 1.0,
        "train/clip_fraction": 0.02,
        "train/logprob_abs_diff": (STALE_DIFF + USUAL_DIFF) / 2 if step >= STALE_FROM else USUAL_DIFF,
        "perf/step_s": STEP_S,
        "perf/rollout_s": 6.0,
        "perf/train_s": 2.5,
        "perf/idle_fraction": 0.7,
    }


def groups_of(step: int) -> list[SampleGroup]:
    groups = [
        SampleGroup(NUM_GROUPS * step + at, at, [_sample(step, GROUP_SIZE * at + member) for member in range(GROUP_SIZE)])
        for at in range(NUM_GROUPS)
    ]
    if step == 2:
        groups[3].kept, groups[3].drop_reason = False, "zero_std"
    return groups


def _sample(step: int, row: int) -> Sample:
    group = row // GROUP_SIZE
    right = (row * 7 + 3) % NUM_STEPS <= step
    text = SCRIPT if (step, row) == HOSTILE else f"<think>step {step}, row {row}</think>\\boxed{{{'7' if right else '0'}}}"
    ids = np.array(tokenizer().encode(text, add_special_tokens=False).ids, np.int32)
    start = START_S + STEP_S * step
    end = start + 1 + 4.5 * (row + 1) / (NUM_GROUPS * GROUP_SIZE)  # the last row ends at 5.5 s
    failed = (step, row) == FAILED
    truncated = (step, row) == TRUNCATED
    status = SampleStatus.FAILED if failed else SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED
    return Sample(
        index=NUM_GROUPS * GROUP_SIZE * step + row,
        group_index=NUM_GROUPS * step + group,
        prompt=[{"role": "user", "content": PROMPTS[group]}],
        prompt_ids=rendered_ids(PROMPTS[group]),
        label="7",
        metadata={"start_rollout_id": step},
        response_ids=ids,
        loss_mask=np.array([at > 0 for at in range(len(ids))], np.int8),
        engine_logprobs=np.linspace(-2, -0.1, len(ids)).astype(np.float32),
        versions=np.full(len(ids), step - 1 if stale(step, group) else step, np.int32),
        status=status,
        finish_reason="length" if truncated else "stop",
        error="the reward server answered 500" if failed else None,
        reward=None if failed else float(right),
        response=text,
        spans=[
            Span("generate", start + 1, end, engine=STALE_ENGINE if group >= NUM_GROUPS // 2 else 0, num_tokens=len(ids)),
            Span("reward", end, end + 0.25),
        ],
    )


def rendered_ids(question: str) -> np.ndarray:
    """Return the ids of a question as the chat template renders it."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return np.array(tokenizer().encode(text, add_special_tokens=False).ids, np.int32)


def stale(step: int, group: int) -> bool:
    """Change the tokens as if the previous weights had sampled them."""
    return step >= STALE_FROM and group >= NUM_GROUPS // 2


def training_of(groups: Iterable[SampleGroup]) -> Training:
    samples = [sample for group in groups if group.kept for sample in group.samples if sample.status != SampleStatus.FAILED]
    trained = [_trained(sample) for sample in samples]
    scores = {
        at: TokenScores(
            sample.engine_logprobs - (STALE_DIFF if _is_stale(sample) else USUAL_DIFF), np.full(len(sample.response_ids), 0.25, np.float32)
        )
        for at, sample in enumerate(samples)
    }
    return Training(trained, scores)


def _is_stale(sample: Sample) -> bool:
    step, row = divmod(sample.index, NUM_GROUPS * GROUP_SIZE)
    return stale(step, row // GROUP_SIZE)


def _trained(sample: Sample) -> TrainSample:
    reward = sample.reward_value()
    return TrainSample(
        index=sample.index,
        group_index=sample.group_index,
        tokens=sample.tokens,
        prompt_length=len(sample.prompt_ids),
        loss_mask=sample.loss_mask,
        reward=reward,
        engine_logprobs=sample.engine_logprobs,
        versions=sample.versions,
        mask_sum=float(sample.loss_mask.sum()),
        teacher_logprobs=sample.engine_logprobs - 0.75,
        values=np.full(len(sample.response_ids), 0.5, np.float32),
        returns=np.full(len(sample.response_ids), reward, np.float32),
        advantages=np.full(len(sample.response_ids), reward - 0.5, np.float32),
    )


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Run that is still being written."""

    directory: RunDirectory

    def step(self, step: int) -> None:
        write_step(self.directory, step)


def begin_run(path: Path, *, num_rollouts: int = NUM_STEPS) -> LiveRun:
    """Start a run without recorded steps; the caller closes its directory."""
    config = Config.model_validate({"model": {"hf_checkpoint": str(MODEL)}, "data": {"num_rollout": num_rollouts}})
    return LiveRun(RunDirectory.create(path, config, resume=False))


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))
