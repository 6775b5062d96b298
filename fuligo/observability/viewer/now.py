"""What a run does right now, how fast, and when it will end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fuligo.observability.viewer.attribution import PRIORITY, ROLLOUT
from fuligo.observability.viewer.metric_columns import MetricColumns, finite, median
from fuligo.observability.viewer.trace_reader import PhaseEvent, TraceReader

WINDOW_STEPS = 20
"""Recent steps that the pace is taken from."""
DOING = {
    "start": "loading",
    "rollout": "sampling",
    "score": "scoring",
    "train": "training",
    "sync": "sending weights",
    "eval": "evaluating",
    "save": "saving a checkpoint",
    "record": "writing samples",
}


@dataclass(frozen=True, slots=True)
class Now:
    doing: str | None
    """None where this is unknown."""
    doing_step: int | None
    since_s: float | None
    """Seconds since the epoch."""
    step_s: float | None
    """Of a recent step (median)."""
    left_s: float | None
    """Until the last step is done, at this pace."""


def what_now(metrics: MetricColumns, num_rollouts: int | None, trace: TraceReader) -> Now:
    """By the phase that has begun; where a run of an earlier version does not tell, by what followed the last one in the steps before."""
    step_s = median(finite(metrics.column("perf/step_s")[-WINDOW_STEPS:]))
    latest = metrics.latest("step")
    num_done = 0 if latest is None else int(latest) + 1
    left_s = step_s * (num_rollouts - num_done) if step_s is not None and num_rollouts is not None and num_rollouts >= num_done else None
    if trace.begun:
        name, step = min(trace.begun, key=_rank)
        return Now(DOING.get(name, name), step, trace.begun[name, step], step_s, left_s)
    last = trace.last
    name = _successor(last, trace.by_step) if last is not None else None
    if last is None or name is None:
        return Now(None, None, None, step_s, left_s)
    return Now(DOING.get(name, name), last.step + (_begins_step(name, last.name)), last.end_s, step_s, left_s)


def _rank(phase: tuple[str, int]) -> int:
    """Rollouts run beside other phases, and are what the run does where there is no other."""
    name = phase[0]
    return PRIORITY.index(name) if name in PRIORITY else len(PRIORITY) + (name == ROLLOUT)


def _successor(last: PhaseEvent, by_step: Mapping[int, Sequence[PhaseEvent]]) -> str | None:
    """The name of the phase that came after one like `last`, most recently."""
    for step in range(last.step - 1, max(-1, last.step - WINDOW_STEPS), -1):
        phases = sorted([*by_step.get(step, ()), *by_step.get(step + 1, ())], key=lambda phase: phase.start_s)
        for before, after in pairwise(phases):
            if before.name == last.name and before.step == step:
                return after.name
    return {"start": "sync", "sync": "rollout", "rollout": "score", "score": "train", "train": "sync"}.get(last.name)


def _begins_step(name: str, after: str) -> int:
    return int(name == "rollout" and after != "eval")
