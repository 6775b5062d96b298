"""State of a run, determined from outside without touching it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

State = Literal["finished", "running", "quiet", "stopped", "empty"]
STALE_STEPS = 5
"""Usual steps without a write after which a run counts as stopped or hanging."""
FRESH_S = 60.0
START_S = 900.0
"""Seconds of the same before the end of the first step, when models load and engines capture graphs."""


def run_state(*, num_done: int, num_rollouts: int | None, locked: bool, age_s: float | None, step_s: float | None) -> State:
    """Return the state of a run.

    Args:
        num_done: complete rollouts.
        num_rollouts: rollouts of the whole run, if known.
        locked: whether a process has the lock.
        age_s: seconds since a file last changed.
        step_s: seconds of a usual step.
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
    """Return whether a process has the lock of a run, given its `metrics.jsonl`; None if this is not known.

    The kernel's table is read, because trying the lock could make a run fail that starts at that moment.
    """
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4321 08:01:1835033 0 EOF
    return any(" FLOCK " in line and line.split()[-3].endswith(f":{inode}") for line in lines)
