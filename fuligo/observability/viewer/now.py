"""State of a run as its files show it, with its current phase, pace and expected end."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuligo.observability.trace import DOING
from fuligo.observability.viewer.attribution import PRIORITY, ROLLOUT
from fuligo.observability.viewer.metric_columns import MetricColumns, finite, median
from fuligo.observability.viewer.trace_reader import TraceReader

State = Literal["finished", "running", "quiet", "stopped", "empty"]
"""State of a run. quiet: its process is alive, but has written nothing for long. stopped: no process is known, and some of its
rollouts are complete, but not all. empty: no process is known, and no rollout is complete."""
STALE_STEPS = 5
"""Number of median step times without a write after which a run counts as stopped or hanging."""
FRESH_S = 60.0
"""Seconds without a write up to which a run never counts as stopped or hanging, however fast its steps are."""
START_S = 900.0
"""Seconds without a write after which a run without a complete step counts as stopped or hanging: models load, engines capture graphs."""
WINDOW_STEPS = 20
"""Number of recent steps that determine the pace."""


@dataclass(frozen=True, slots=True)
class Now:
    """Current activity of a run, its pace and its expected end."""

    doing: str | None
    """Current activity; None if unknown."""
    doing_step: int | None
    """Step of the activity; None if unknown."""
    since_s: float | None
    """Start of the activity, seconds since the epoch; None if unknown."""
    step_s: float | None
    """Median seconds of recent steps; None before the first step."""
    left_s: float | None
    """Seconds until the end of the run at this pace; None if unknown."""


def current_activity(metrics: MetricColumns, num_rollouts: int | None, trace: TraceReader) -> Now:
    """Return the driver's phase in progress, if there is one, with the pace and the expected end of the run."""
    step_s, num_left = recent_step_s(metrics), None if num_rollouts is None else num_rollouts - metrics.num_done
    left_s = step_s * num_left if step_s is not None and num_left is not None and num_left >= 0 else None
    if trace.begun:
        name, step = min(trace.begun, key=_rank)
        return Now(DOING.get(name, name), step, trace.begun[name, step], step_s, left_s)
    return Now(None, None, None, step_s, left_s)


def recent_step_s(metrics: MetricColumns) -> float | None:
    """Return the median seconds of recent steps; None before the first."""
    return median(finite(metrics.column("perf/step_s")[-WINDOW_STEPS:]))


def _rank(phase: tuple[str, int]) -> int:
    """Return the sort key of a phase. A rollout may run in parallel with other phases, so it comes last."""
    name = phase[0]
    return PRIORITY.index(name) if name in PRIORITY else len(PRIORITY) + (name == ROLLOUT)


def run_state(*, num_done: int, num_rollouts: int | None, locked: bool, age_s: float | None, step_s: float | None) -> State:
    """Return the state of a run whose files changed `age_s` seconds ago; `step_s`: median seconds of recent steps.

    Without the number of rollouts, a run without a lock counts as running while its files change.
    """
    if num_rollouts is not None and num_done >= num_rollouts and not locked:
        return "finished"
    fresh = age_s is not None and age_s < (START_S if step_s is None else max(FRESH_S, STALE_STEPS * step_s))
    if locked:
        return "running" if fresh else "quiet"
    if fresh and num_rollouts is None:
        return "running"
    return "stopped" if num_done else "empty"


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of the run with this `metrics.jsonl`; None if that is not known.

    Reads the kernel's table, because taking the lock, however briefly, could make a run fail that starts at that moment.
    """
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4321 08:01:1835033 0 EOF
    return any(" FLOCK " in line and line.split()[-3].endswith(f":{inode}") for line in lines)
