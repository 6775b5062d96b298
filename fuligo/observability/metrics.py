"""Metrics of a step as one flat record, and which of its keys depend on the clock."""

import time
from collections.abc import Mapping

from fuligo.observability.jsonl import Record
from fuligo.types import StepResult

TIMING_KEYS = frozenset({"time", "rollout/tokens_per_s", "train/tokens_per_s", "rollout/sample/environment_s"})
TIMING_PREFIXES = ("perf/", "engine/")
TRAINER_PHASES = ("score", "train")
"""Phases in which the trainer computes."""


def is_timing(key: str) -> bool:
    """Return whether the value depends on the clock and so differs between two runs that are otherwise equal bit for bit."""
    return key in TIMING_KEYS or key.startswith(TIMING_PREFIXES)


def step_record(
    step: int, policy_version: int, rollout: Mapping[str, float], result: StepResult | None, perf: Mapping[str, float]
) -> Record:
    """Return the line of `metrics.jsonl` for one step.

    Args:
        step: rollout id.
        policy_version: version of the weights after the step.
        rollout: `rollout/*`, `engine/*`.
        result: result of training; None if nothing was trained.
        perf: `perf/*`, from `perf_metrics`.
    """
    train = result.metrics if result is not None else {}
    return {"step": step, "policy_version": policy_version, "time": time.time(), **_numbers(rollout), **_numbers(train), **_numbers(perf)}


def perf_metrics(durations: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Return the metrics `perf/*` of one step.

    Args:
        durations: seconds of each phase of the step, by name (`Trace.take_durations`).
        step_s: seconds from the end of the previous step to the end of this one. If rollouts run ahead of training, phases of
            other steps run at the same time, so the phases need not add up to it.
    """
    trained_s = sum(durations.get(phase, 0.0) for phase in TRAINER_PHASES)
    idle = max(0.0, 1.0 - trained_s / step_s) if step_s > 0 else 0.0
    return {"perf/step_s": step_s, **{f"perf/{phase}_s": seconds for phase, seconds in durations.items()}, "perf/idle_fraction": idle}


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert NumPy scalars to plain ones."""
    return {key: value if isinstance(value, int) else float(value) for key, value in metrics.items()}
