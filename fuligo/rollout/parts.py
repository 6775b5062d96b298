"""What rollouts are made with, whether they are made one at a time or without pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuligo.config.groups import RolloutFlags
from fuligo.engines.generation import SamplingParams
from fuligo.rollout.protocol import EngineControl, GroupFilter, GroupStream, RewardFn
from fuligo.rollout.sampler import Sampler
from fuligo.types import SampleGroup


@dataclass(slots=True, frozen=True, kw_only=True)
class RunnerParts:
    """Of `RolloutRunner` and `ContinuousRunner`."""

    source: GroupStream
    """Where groups come from and unfinished ones go to."""
    sampler: Sampler
    """Generates one sample."""
    reward: RewardFn
    """Judges a finished group's samples."""
    engines: EngineControl
    """Where samples are generated; for abort and the aligned start."""
    params: SamplingParams
    """Of every sample."""
    flags: RolloutFlags
    """Sizes and modes."""
    reward_key: str | None = None
    """Which value of a dict reward the metrics report."""
    group_filter: GroupFilter | None = None
    """Keeps or drops a finished group (dynamic sampling)."""
    sample_filter: Callable[[list[SampleGroup]], None] | None = None
    """Sees all groups that are handed out; changes samples in place."""
    policy_version: Callable[[], int] = lambda: 0
    """Of the weights in the engines."""
