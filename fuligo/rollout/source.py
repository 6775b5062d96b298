"""Source of the groups of a rollout: unfinished groups of earlier rollouts, then returned prompts, then the data."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import numpy as np

from fuligo.data.source import PromptSource
from fuligo.errors import HookError
from fuligo.rollout.filters import pop_first
from fuligo.rollout.protocol import BufferFilter, Draw, GroupStream, RolloutState
from fuligo.types import Prompt, Sample, SampleGroup, SampleStatus

START_ROLLOUT_ID = "start_rollout_id"
POP_FIRST = partial(pop_first, None)


@dataclass(eq=False)
class GroupSource:
    """Source that numbers the samples and groups of the whole run, and holds the partial-rollout buffer. Implements `GroupStream`."""

    prompts: PromptSource
    num_samples_per_prompt: int
    _: KW_ONLY
    partial_rollout: bool = False
    """True: `put_back` keeps groups with their tokens; False: only their prompts are drawn again."""
    buffer_filter: BufferFilter = POP_FIRST
    mask_offpolicy: bool = False
    """True to mask tokens of earlier rollouts out of the loss."""
    max_staleness: int | None = None
    """Largest age of a token, in versions; buffered groups with an older one start over from their prompt. None: no limit."""
    _buffer: list[SampleGroup] = field(default_factory=list, init=False)
    _next_sample_index: int = field(default=0, init=False)
    _next_group_index: int = field(default=0, init=False)

    def draw(self, num_groups: int, step: int, policy_version: int) -> Draw:
        """Draw groups, buffered ones first. Raises HookError if the buffer filter returned groups that are not buffered, or too many."""
        num_stale = self._drop_stale(policy_version)
        resumed = [continuation(group, step, self.mask_offpolicy) for group in self._take_buffered(num_groups, step)]
        fresh = [self._new_group(prompt, step) for prompt in self.prompts.take(num_groups - len(resumed))]
        return Draw(resumed + fresh, num_stale)

    def put_back(self, groups: list[SampleGroup]) -> None:
        if self.partial_rollout:
            self._buffer.extend(groups)
        else:
            self.prompts.give_back([_prompt(group) for group in groups])

    def state(self, step: int) -> RolloutState:
        return RolloutState(self.prompts.state(), self._next_sample_index, self._next_group_index, list(self._buffer))

    def restore(self, state: RolloutState) -> None:
        self.prompts.restore(state.source)
        self._next_sample_index, self._next_group_index = state.next_sample_index, state.next_group_index
        self._buffer = list(state.buffer)

    def _new_group(self, prompt: Prompt, step: int) -> SampleGroup:
        group = new_group(prompt, self._next_group_index, self.num_samples_per_prompt, self._next_sample_index)
        for sample in group.samples:
            sample.metadata[START_ROLLOUT_ID] = step
        self._next_sample_index += self.num_samples_per_prompt
        self._next_group_index += 1
        return group

    def _drop_stale(self, policy_version: int) -> int:
        """Drop buffered groups that are too old to continue, and return their number. Their prompts are drawn again."""
        if self.max_staleness is None:
            return 0
        oldest = policy_version - self.max_staleness
        stale = [group for group in self._buffer if first_version(group, policy_version) < oldest]
        self._forget(stale)
        return len(stale)

    def _take_buffered(self, num_groups: int, step: int) -> list[SampleGroup]:
        """Take the groups that the buffer filter chooses. Groups that it removes but does not return start over from their prompt."""
        if not self._buffer:
            return []
        by_index = {group.index: group for group in self._buffer}
        offered = [list(group.samples) for group in self._buffer]
        chosen = self.buffer_filter(step, offered, num_groups)
        indices = [samples[0].group_index if samples else None for samples in chosen]
        if len(chosen) > num_groups or len(set(indices)) < len(indices) or not by_index.keys() >= set(indices):
            raise HookError(
                f"--buffer-filter-path: the function returned the groups {indices}; it must return at most {num_groups} of the buffered "
                f"groups {sorted(by_index)}, each once and as it was in the buffer"
            )
        taken = [replace(by_index[samples[0].group_index], samples=samples) for samples in chosen]
        left = {samples[0].group_index for samples in offered if samples}
        self._forget([group for index, group in by_index.items() if index not in left and index not in indices])
        self._buffer = [group for group in self._buffer if group.index not in indices]
        return taken

    def _forget(self, groups: list[SampleGroup]) -> None:
        if not groups:
            return
        gone = {group.index for group in groups}
        self._buffer = [group for group in self._buffer if group.index not in gone]
        self.prompts.give_back([_prompt(group) for group in groups])


def new_group(prompt: Prompt, index: int, num_samples: int, first_sample: int | None = None) -> SampleGroup:
    """Return a group of pending samples, numbered from `first_sample` on; by default, as if all groups had as many samples."""
    first = index * num_samples if first_sample is None else first_sample
    samples = [
        Sample(number, index, prompt.prompt, prompt.prompt_ids, prompt.label, deepcopy(prompt.metadata), prompt.images)
        for number in range(first, first + num_samples)
    ]
    return SampleGroup(index, prompt.row, samples)


def continuation(group: SampleGroup, step: int, mask_offpolicy: bool) -> SampleGroup:
    """Copy a group to continue it, with its tokens, log-probabilities and versions. `mask_offpolicy` masks the tokens so far."""
    samples = [_copy(sample, step, mask_offpolicy) for sample in group.samples]
    return SampleGroup(group.index, group.row, samples)


def _copy(sample: Sample, step: int, mask_offpolicy: bool) -> Sample:
    metadata = deepcopy(sample.metadata)
    if sample.status is SampleStatus.PENDING and sample.response_length == 0:
        metadata[START_ROLLOUT_ID] = step
    episode = deepcopy(sample.episode)
    if episode is not None and mask_offpolicy:
        for branch in episode.branches:
            branch.loss_mask = np.zeros_like(branch.loss_mask)
    return replace(
        sample,
        metadata=metadata,
        response_ids=sample.response_ids.copy(),
        loss_mask=np.zeros_like(sample.loss_mask) if mask_offpolicy else sample.loss_mask.copy(),
        engine_logprobs=sample.engine_logprobs.copy(),
        versions=sample.versions.copy(),
        spans=list(sample.spans),
        episode=episode,
    )


def first_version(group: SampleGroup, default: int) -> int:
    """Return the oldest version that sampled a token of the group; `default` if it has no token."""
    parts = [part for sample in group.samples for part in (sample, *(sample.episode.branches if sample.episode else ()))]
    return min((int(part.versions.min()) for part in parts if len(part.versions)), default=default)


def _prompt(group: SampleGroup) -> Prompt:
    sample = group.samples[0]
    metadata = {key: value for key, value in sample.metadata.items() if key != START_ROLLOUT_ID}
    return Prompt(group.row, sample.prompt, sample.prompt_ids, sample.label, metadata, sample.images)


class DataSource:
    """`data_source` of hooks: groups of fresh or unfinished samples."""

    def __init__(self, source: GroupStream, step: int, policy_version: int, groups: Iterable[SampleGroup] = ()) -> None:
        self._source = source
        self._step = step
        self._policy_version = policy_version
        self.rows = {group.index: group.row for group in groups}
        """Row of the dataset by group index."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """Return the next `num_groups` groups of `--n-samples-per-prompt` samples each."""
        groups = self._source.draw(num_groups, self._step, self._policy_version).groups
        self.rows.update((group.index, group.row) for group in groups)
        return [group.samples for group in groups]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Put back groups; they are drawn again, with their tokens under `--partial-rollout`."""
        self._source.put_back([SampleGroup(samples[0].group_index, self.rows[samples[0].group_index], samples) for samples in groups])
