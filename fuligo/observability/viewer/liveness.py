"""Whether a run goes on, seen from outside and without touching it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

State = Literal["finished", "running", "quiet", "stopped", "empty"]
STALE_STEPS = 5
"""A run that wrote nothing for so many of its steps has stopped, or hangs."""
FRESH_S = 60.0
START_S = 900.0
"""The same before the first step is over: models are loaded, engines capture graphs."""


def run_state(*, num_done: int, num_rollouts: int | None, locked: bool, age_s: float | None, step_s: float | None) -> State:
    """
    Args:
        num_done: complete rollouts.
        num_rollouts: of the whole run, where known.
        locked: its process holds the lock.
        age_s: since a file last changed.
        step_s: a usual step.
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
    """Whether a process holds the lock of a run, by its `metrics.jsonl`; None where this cannot be told.

    Read from the kernel's table: trying the lock would be in the way of a run that starts at that moment.
    """
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4321 08:01:1835033 0 EOF
    return any(" FLOCK " in line and line.split()[-3].endswith(f":{inode}") for line in lines)
