"""How long a call to an engine may take that is no request for tokens. A scheduler that hangs answers none, while `/health` is fine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fuligo.errors import EngineError


class Overdue(EngineError):
    """No answer within the deadline: what became of the call is not known."""


class Deadline(NamedTuple):
    """Of one call, with all its tries."""

    seconds: float
    flag: str = ""
    """That makes it longer; empty where none does."""


STEP = Deadline(120.0)
"""Longer than a step of SGLang, which prefills in chunks."""
WEIGHTS = Deadline(600.0)
"""Without flags, as long as an engine may take to start."""
BUCKET = Deadline(300.0)
"""Far shorter than the deadline of the trainer's ranks, which wait meanwhile."""


@dataclass(slots=True, frozen=True)
class ControlDeadlines:
    """By what a call asks of an engine."""

    step: Deadline = STEP
    """What the scheduler does between two of its steps."""
    weights: Deadline = WEIGHTS
    """What concerns all weights, or memory. An engine that starts has as long to load its weights."""
    bucket: Deadline = BUCKET
    """To take one bucket of weights, or to join a process group."""

    @classmethod
    def of_watched(cls, *, health_timeout_s: float, start_timeout_s: float) -> ControlDeadlines:
        """Of SGLang engines that the run started."""
        step = Deadline(max(STEP.seconds, health_timeout_s), "--rollout-health-check-timeout")
        return cls(step, Deadline(start_timeout_s, "--engine-start-timeout-s"))

    @classmethod
    def of_others(cls, *, request_timeout_s: float, start_timeout_s: float) -> ControlDeadlines:
        """Of engines that others started, and of the embedded one, which prefills all that it has room for in one step.

        Where a step outlasts a request's time, its requests have failed.
        """
        weights = Deadline(start_timeout_s, "--engine-start-timeout-s")
        return cls(min(Deadline(request_timeout_s, "--rollout-timeout-s"), weights), weights)


DEFAULT = ControlDeadlines()
