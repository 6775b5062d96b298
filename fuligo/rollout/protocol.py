"""Interfaces within the rollout side, and the data that they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from fuligo.engines.generation import SamplingParams
from fuligo.errors import RolloutError
from fuligo.types import Sample, SampleGroup


class RolloutMethod(Protocol):
    """Method of producing rollouts: in waves, continuously, by a user's function, from conversations or from saved rollouts."""

    async def rollout(self, step: int) -> Rollout:
        """Produce the rollout of `step`; called once per step, in order. Raises FuligoError if it cannot, but not for failed samples."""
        ...

    def restore(self, state: RolloutState) -> None:
        """Continue from the state of a checkpoint; called before the first rollout."""


class GenerateFn(Protocol):
    """Function that turns a pending sample into a finished (or aborted, or failed) one. Rollout code samples only through this.

    It may return several samples (a conversation cut into pieces), which keep the `index`. Samples are changed in place. Tokens
    generated before an abort are kept and continued.
    """

    async def __call__(self, sample: Sample, params: SamplingParams) -> Sample | list[Sample]: ...


@runtime_checkable
class Interruptible(Protocol):
    """GenerateFn whose calls may run for long without an engine request, so that aborting all requests does not stop them."""

    def interrupt(self) -> None:
        """Abort generation: make every running call return an aborted sample as soon as possible."""


class RewardFn(Protocol):
    """Function that sets `reward` on every finished sample of a group. Never raises: if a reward fails, it marks the sample failed."""

    async def __call__(self, group: SampleGroup) -> None: ...


class GroupStream(Protocol):
    """Groups to sample, and the buffer of groups that a rollout leaves unfinished."""

    def draw(self, num_groups: int, step: int, policy_version: int) -> Draw:
        """Draw groups for rollout `step`, unfinished ones of earlier rollouts first."""
        ...

    def put_back(self, groups: list[SampleGroup]) -> None:
        """Take back groups that a rollout left unfinished or dropped as stale, ordered by index; they or their prompts are drawn again."""

    def state(self, step: int) -> RolloutState:
        """Return the position in the data after rollout `step`."""
        ...

    def restore(self, state: RolloutState) -> None: ...


def is_group_list(value: Any) -> bool:
    """Return whether a hook's result is a list of groups, each a non-empty list of samples."""
    return isinstance(value, list) and all(
        isinstance(group, list) and group and all(isinstance(sample, Sample) for sample in group) for group in value
    )


GroupFilter = Callable[[list[Sample]], str | None]
"""Function that judges the usable samples of a group; returns the reason to drop the group, or None to keep it."""

BufferFilter = Callable[[int, list[list[Sample]], int], list[list[Sample]]]
"""Function `(rollout_id, buffer, num_groups)` that removes at most `num_groups` groups from the buffer and returns them."""


@dataclass(slots=True)
class Draw:
    """Groups of one wave. The rollout owns them: changing them changes no buffer and no state."""

    groups: list[SampleGroup]
    num_stale: int = 0
    """Buffered groups that were too old to continue; their prompts are drawn again."""


@dataclass(slots=True)
class RolloutState:
    """Position of sampling after a rollout, saved in the rollout's checkpoint."""

    source: dict[str, int | str | list[int]]
    """Position in the data: epoch, offset, rows to be drawn again."""
    next_sample_index: int = 0
    next_group_index: int = 0
    buffer: list[SampleGroup] = field(default_factory=list)
    """Unfinished groups of a partial rollout; in full-async mode, all groups that are queued or in flight."""

    def copy(self) -> RolloutState:
        """Return a deep copy, so that sampling can continue the groups of the buffer without changing it.

        The arrays of routed experts are shared: sampling replaces them, and they may take gigabytes.
        """
        routed = [sample.routed_experts for group in self.buffer for sample in group.samples]
        buffer = deepcopy(self.buffer, {id(array): array for array in routed if array is not None})
        return RolloutState(deepcopy(self.source), self.next_sample_index, self.next_group_index, buffer)


@dataclass(slots=True)
class Rollout:
    """Batch of one step."""

    step: int
    """Rollout id, 0-based."""
    groups: list[SampleGroup]
    """Kept and dropped groups, ordered by index."""
    state: RolloutState
    metrics: dict[str, float]
    """Metrics of the rollout, such as `rollout/*`."""

    @property
    def kept(self) -> list[SampleGroup]:
        return [group for group in self.groups if group.kept]


class UnfilledRolloutError(RolloutError):
    """Raised if a rollout ends before enough groups are kept; holds its groups, so that they can be recorded."""

    def __init__(self, text: str, step: int, groups: Sequence[SampleGroup]) -> None:
        super().__init__(text)
        self.step = step
        self.groups = groups
