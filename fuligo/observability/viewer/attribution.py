"""Attribution of a step's seconds to causes: every instant has one cause, so that they add up to the step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fuligo.observability.viewer.trace_reader import PhaseEvent

Interval = tuple[float, float]
"""Start and end, seconds since the epoch."""
PRIORITY = ("sync", "train", "score", "save", "eval", "record")
"""Phases by priority: if several run at the same time, the first is the cause. A rollout that runs during training comes last."""
ROLLOUT = "rollout"
SAMPLING = "sampling"
STRAGGLERS = "last samples"
REWARD = "reward"
BETWEEN = "between phases"
TAIL_SHARE = 0.25
"""Share of the peak number of concurrent samples below which the rollout waits for its last samples."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Seconds of a step with one cause."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SampleSpans:
    """Intervals of a rollout's samples; empty if they are not known."""

    generate: Sequence[Interval] = ()
    reward: Sequence[Interval] = ()


def attribute(window: Interval, phases: Iterable[PhaseEvent], spans: SampleSpans | None = None) -> list[Cause]:
    """Return the seconds of `window` by cause, longest first; they sum to its length.

    `phases` may be of any step. `spans` of samples divide the time of the rollout that no other phase covers.
    """
    start, end = window
    if end <= start:
        return []
    inside = [phase for phase in phases if phase.end_s > start and phase.start_s < end]
    names = [name for name in PRIORITY if any(phase.name == name for phase in inside)]
    names += sorted({phase.name for phase in inside} - {*PRIORITY, ROLLOUT})
    names += [ROLLOUT] if any(phase.name == ROLLOUT for phase in inside) else []
    generate = _clipped(spans.generate, window) if spans else np.empty((0, 2))
    reward = _clipped(spans.reward, window) if spans else np.empty((0, 2))
    by_name = {name: _clipped([(phase.start_s, phase.end_s) for phase in inside if phase.name == name], window) for name in names}
    cuts = np.unique(np.concatenate([np.array([start, end]), *(part.ravel() for part in (*by_name.values(), generate, reward))]))
    lengths = np.diff(cuts)
    owner = np.full(len(lengths), len(names))
    for position, name in reversed(list(enumerate(names))):
        owner[_active(by_name[name], cuts) > 0] = position
    labels = np.array([*names, BETWEEN], dtype=object)[owner]
    if len(generate) or len(reward):
        generating = _active(generate, cuts)
        rollout = labels == ROLLOUT
        most = generating.max(initial=0)
        labels[rollout & (generating > 0)] = SAMPLING
        labels[rollout & (generating > 0) & (generating < TAIL_SHARE * most)] = STRAGGLERS
        labels[rollout & (generating == 0) & (_active(reward, cuts) > 0)] = REWARD
    seconds = [Cause(str(name), float(lengths[labels == name].sum())) for name in dict.fromkeys(labels)]
    return sorted((cause for cause in seconds if cause.seconds > 0), key=lambda cause: -cause.seconds)


def covered(window: Interval, intervals: Iterable[Interval]) -> float:
    """Return the seconds of `window` that at least one interval covers."""
    clipped = _clipped(list(intervals), window)
    cuts = np.unique(np.concatenate([np.array(window), clipped.ravel()]))
    return float(np.diff(cuts)[_active(clipped, cuts) > 0].sum())


def concurrency(window: Interval, intervals: Sequence[Interval], num_points: int) -> list[int]:
    """Return the number of intervals at the middle of each of `num_points` equal parts of the window."""
    clipped = _clipped(intervals, window)
    edges = np.linspace(*window, num_points + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    started = np.searchsorted(np.sort(clipped[:, 0]), middles, side="right")
    return (started - np.searchsorted(np.sort(clipped[:, 1]), middles, side="right")).tolist()


def _clipped(intervals: Sequence[Interval], window: Interval) -> np.ndarray:
    """Return the parts of the intervals inside the window, [N, 2]."""
    array = np.clip(np.array(intervals, np.float64).reshape(-1, 2), *window)
    return array[array[:, 1] > array[:, 0]]


def _active(intervals: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Return how many intervals cover each segment between consecutive cuts, [len(cuts) - 1]; intervals begin and end at cuts."""
    change = np.zeros(len(cuts), np.int64)
    np.add.at(change, np.searchsorted(cuts, intervals[:, 0]), 1)
    np.add.at(change, np.searchsorted(cuts, intervals[:, 1]), -1)
    return np.cumsum(change)[:-1]
