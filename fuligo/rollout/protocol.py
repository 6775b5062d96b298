"""The seams of the rollout side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fuligo.engines.client import PauseMode
from fuligo.engines.generation import EngineLoad, SamplingParams
from fuligo.types import Prompt, Sample, SampleGroup


class GenerateFn(Protocol):
    """Turns a pending sample into a finished (or aborted, or failed) one. Rollout code knows engines only through this.

    Several samples may come of one (a conversation cut into pieces): they keep its `index`. Samples are changed in place; what
    was generated before an abort is continued, never thrown away.
    """

    async def __call__(self, sample: Sample, params: SamplingParams) -> Sample | list[Sample]: ...


class RewardFn(Protocol):
    """Sets `reward` on every finished sample of a group; a reward that fails marks its sample failed, it never raises."""

    async def __call__(self, group: SampleGroup) -> None: ...


class EngineControl(Protocol):
    """What a rollout asks of the engines as a whole; `engines.group.EngineGroup` is one."""

    async def abort_all(self) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def load(self) -> EngineLoad: ...


class PromptStream(Protocol):
    """Prompts in an order that can be saved; `data` has the one that reads files."""

    def take(self, num_prompts: int, /) -> list[Prompt]:
        """The next prompts, those given back first; it begins a new epoch when one ends."""
        ...

    def give_back(self, prompts: list[Prompt], /) -> None:
        """Prompts that were taken and not used; they are the next to be taken."""
        ...

    def state(self) -> dict[str, int | list[int]]: ...

    def restore(self, state: dict[str, int | list[int]], /) -> None: ...


class GroupStream(Protocol):
    """Groups to sample, and a place for those that a rollout leaves unfinished."""

    def draw(self, num_groups: int, step: int, policy_version: int) -> Draw:
        """Groups for rollout `step`, unfinished ones of earlier rollouts first."""
        ...

    def put_back(self, groups: list[SampleGroup]) -> None:
        """Unfinished groups of a rollout that has enough, ordered by index."""
        ...

    def state(self, step: int) -> RolloutState:
        """Where drawing stands after rollout `step`."""
        ...

    def restore(self, state: RolloutState) -> None: ...


GroupFilter = Callable[[list[Sample]], str | None]
"""Judges a group's usable samples; the reason to drop them, or None to keep them."""

BufferFilter = Callable[[int, list[list[Sample]], int], list[list[Sample]]]
"""`(rollout_id, buffer, num_groups)`: takes at most `num_groups` groups out of the buffer."""


@dataclass(slots=True)
class Draw:
    """Groups of one wave. They are the rollout's own: what it does to them changes no buffer and no state."""

    groups: list[SampleGroup]
    num_stale: int = 0
    """Buffered groups that were too old to continue; their prompts start anew, now or later."""


@dataclass(slots=True)
class RolloutState:
    """Where sampling stands after a rollout; a checkpoint of that rollout saves it, a resume starts from it."""

    source: dict[str, int | list[int]]
    """Position in the data: epoch, offset, rows that wait to be drawn again."""
    next_sample_index: int = 0
    next_group_index: int = 0
    buffer: list[SampleGroup] = field(default_factory=list)
    """Unfinished groups of a partial rollout."""


@dataclass(slots=True)
class Rollout:
    """What one rollout gave."""

    step: int
    """Rollout id, 0-based."""
    groups: list[SampleGroup]
    """Kept and not kept ones, ordered by index."""
    state: RolloutState
    metrics: dict[str, float]
    """`rollout/*`"""

    @property
    def kept(self) -> list[SampleGroup]:
        return [group for group in self.groups if group.kept]
