"""Deadlines of control calls to engines. A scheduler that hangs answers none of them, though `/health` still succeeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fuligo.errors import EngineError


class Overdue(EngineError):
    """Missing answer at the deadline: whether the call took effect is unknown."""


class Deadline(NamedTuple):
    """Time limit of one call over all its attempts."""

    seconds: float
    flag: str = ""
    """Flag that raises the limit; empty if none does."""


STEP = Deadline(120.0)
"""Longer than a step of SGLang, which prefills in chunks."""
WEIGHTS = Deadline(600.0)
"""Same as the default time for an engine to start."""
BUCKET = Deadline(300.0)
"""Far shorter than the deadline of the trainer's ranks, which wait for it."""


@dataclass(slots=True, frozen=True)
class ControlDeadlines:
    """Deadlines by kind of call."""

    step: Deadline = STEP
    """Calls that the scheduler handles between two steps."""
    weights: Deadline = WEIGHTS
    """Calls about all weights or memory; an engine has as long to load its weights when it starts."""
    bucket: Deadline = BUCKET
    """Loading one bucket of weights, or joining a process group."""

    @classmethod
    def of_watched(cls, *, health_timeout_s: float, start_timeout_s: float) -> ControlDeadlines:
        """Return the deadlines of SGLang engines that the run started."""
        step = Deadline(max(STEP.seconds, health_timeout_s), "--rollout-health-check-timeout")
        return cls(step, Deadline(start_timeout_s, "--engine-start-timeout-s"))

    @classmethod
    def of_others(cls, *, request_timeout_s: float, start_timeout_s: float) -> ControlDeadlines:
        """Return the deadlines of engines that others started, and of the embedded one, which prefills all it has room for in one step.

        If a step takes longer than a request may, its requests have failed anyway.
        """
        weights = Deadline(start_timeout_s, "--engine-start-timeout-s")
        return cls(min(Deadline(request_timeout_s, "--rollout-timeout-s"), weights), weights)


DEFAULT = ControlDeadlines()
