"""Current phase, pace and expected end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fuligo.observability.viewer.attribution import PRIORITY, ROLLOUT
from fuligo.observability.viewer.metric_columns import MetricColumns, finite, median
from fuligo.observability.viewer.trace_reader import PhaseEvent, TraceReader

WINDOW_STEPS = 20
"""Number of recent steps that determine the pace."""
DOING = {
    "start": "loading",
    "rollout": "sampling",
    "score": "scoring",
    "train": "training",
    "sync": "syncing weights",
    "eval": "evaluating",
    "save": "saving a checkpoint",
    "record": "writing samples",
}


@dataclass(frozen=True, slots=True)
class Now:
    doing: str | None
    """Current activity; None if unknown."""
    doing_step: int | None
    since_s: float | None
    """Start of the activity, seconds since the epoch."""
    step_s: float | None
    """Median seconds of recent steps."""
    left_s: float | None
    """Seconds until the end of the run at this pace."""


def current_activity(metrics: MetricColumns, num_rollouts: int | None, trace: TraceReader) -> Now:
    """Return the current activity: the phase that has begun, or, in traces of earlier versions, the usual successor of the last phase."""
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
    """Return the sort key of a phase. A rollout runs beside other phases and counts only if there is no other."""
    name = phase[0]
    return PRIORITY.index(name) if name in PRIORITY else len(PRIORITY) + (name == ROLLOUT)


def _successor(last: PhaseEvent, by_step: Mapping[int, Sequence[PhaseEvent]]) -> str | None:
    """Return the name of the phase that most recently followed one like `last`."""
    for step in range(last.step - 1, max(-1, last.step - WINDOW_STEPS), -1):
        phases = sorted([*by_step.get(step, ()), *by_step.get(step + 1, ())], key=lambda phase: phase.start_s)
        for before, after in pairwise(phases):
            if before.name == last.name and before.step == step:
                return after.name
    return {"start": "sync", "sync": "rollout", "rollout": "score", "score": "train", "train": "sync"}.get(last.name)


def _begins_step(name: str, after: str) -> int:
    return int(name == "rollout" and after != "eval")
