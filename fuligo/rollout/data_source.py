"""`data_source` that hooks see: prompts of the training data, and groups given back to it."""

from collections.abc import Iterable

from fuligo.rollout.protocol import GroupStream
from fuligo.types import Sample, SampleGroup


class DataSource:
    """`data_source` of hooks: groups of fresh or unfinished samples."""

    def __init__(self, source: GroupStream, step: int, policy_version: int, groups: Iterable[SampleGroup] = ()) -> None:
        self._source = source
        self._step = step
        self._policy_version = policy_version
        self.rows = {group.index: group.row for group in groups}
        """Row of the data set by group index."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """Return the next `num_groups` groups of `--n-samples-per-prompt` samples each."""
        groups = self._source.draw(num_groups, self._step, self._policy_version).groups
        self.rows.update((group.index, group.row) for group in groups)
        return [group.samples for group in groups]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Put back groups; they are drawn again, with their tokens under `--partial-rollout`."""
        self._source.put_back([SampleGroup(samples[0].group_index, self.rows[samples[0].group_index], samples) for samples in groups])
