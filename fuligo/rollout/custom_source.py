"""User's data source (`--data-source-path`), which replaces prompt files and buffer.

It is created as `Source(args)` and has these methods:
`get_samples(num_groups) -> list[list[Sample]]` returns groups to sample; groups that came back through `add_samples` are continued.
`add_samples(groups)` takes back groups that a rollout left unfinished.
`save(rollout_id)` is called after every rollout, `load(rollout_id)` on resume with the last complete rollout.
`__len__()` returns the number of prompts.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from fuligo.config.hooks import reraised
from fuligo.errors import DataError, RolloutError
from fuligo.quantities import count
from fuligo.rollout.protocol import Draw, RolloutState, is_group_list
from fuligo.rollout.sampler import malformation
from fuligo.rollout.source import START_ROLLOUT_ID, continuation
from fuligo.types import IntArray, Sample, SampleGroup, SampleStatus

NO_ROW = -1
"""`SampleGroup.row` of prompts that do not come from a file."""


@dataclass(eq=False)
class CustomSource:
    """`GroupStream` over the user's data source. It numbers new samples itself and ignores the indices that they come with."""

    hook: Any
    """User's data source; see the module's docstring."""
    _: KW_ONLY
    partial_rollout: bool = False
    """True: unfinished groups return to the data source with their tokens; False: as fresh samples."""
    mask_offpolicy: bool = False
    """True to mask tokens of earlier rollouts out of the loss."""
    _next_sample_index: int = field(default=0, init=False)
    _next_group_index: int = field(default=0, init=False)

    def draw(self, num_groups: int, step: int, policy_version: int) -> Draw:
        """Draw groups from the data source. Raises RolloutError if `get_samples` raised, or returned too many or malformed groups."""
        drawn = self._call(self.hook.get_samples, num_groups)
        if not is_group_list(drawn) or len(drawn) > num_groups:
            raise RolloutError(
                f"--data-source-path: get_samples({num_groups}) must return a list of at most {count(num_groups, 'group')}, "
                f"each a non-empty list of Sample; it returned {drawn!r:.200}"
            )
        return Draw([self._group(samples, step) for samples in drawn])

    def put_back(self, groups: list[SampleGroup]) -> None:
        if groups:
            unfinished = [group.samples if self.partial_rollout else list(map(_fresh, group.samples)) for group in groups]
            self._call(self.hook.add_samples, unfinished)

    def state(self, step: int) -> RolloutState:
        self._call(self.hook.save, step)
        return RolloutState({"rollout_id": step}, self._next_sample_index, self._next_group_index)

    def restore(self, state: RolloutState) -> None:
        rollout_id = state.source.get("rollout_id")
        if not isinstance(rollout_id, int):
            raise DataError(
                "cannot resume with --data-source-path: the checkpoint's run read its prompts from a file; resume with its --prompt-data, "
                "or start a new run from the checkpoint's weights with --ref-load"
            )
        self._call(self.hook.load, rollout_id)
        self._next_sample_index, self._next_group_index = state.next_sample_index, state.next_group_index

    def _call(self, method: Callable[[Any], Any], argument: Any) -> Any:
        with reraised(f"--data-source-path: {method.__name__} raised", method):
            return method(argument)

    def _group(self, samples: list[Sample], step: int) -> SampleGroup:
        """Return a group of the data source, numbered if nothing was generated for it yet. Raises RolloutError if a sample is malformed."""
        group = continuation(SampleGroup(samples[0].group_index, NO_ROW, samples), step, self.mask_offpolicy)
        for sample in group.samples:
            sample.prompt_ids = _prompt_ids(sample)
            if (problem := malformation(sample)) is not None:
                raise RolloutError(f"--data-source-path: get_samples returned sample {sample.index} with a {problem}")
        if all(sample.status is SampleStatus.PENDING and not sample.response_length for sample in group.samples):
            group.index = self._next_group_index
            self._next_group_index += 1
            for sample in group.samples:
                sample.index, sample.group_index = self._next_sample_index, group.index
                self._next_sample_index += 1
        return group


def _prompt_ids(sample: Sample) -> IntArray:
    """Return the token ids of the prompt. Raises RolloutError if they are missing or invalid."""
    ids = np.asarray(sample.prompt_ids)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise RolloutError(
            f"--data-source-path: get_samples returned a sample whose prompt_ids are {sample.prompt_ids!r:.80}; set them to at least one "
            "token id, because the engine reads prompt_ids, not `prompt`"
        )
    return ids.astype(np.int32)


def _fresh(sample: Sample) -> Sample:
    """Copy a sample without its response."""
    metadata = {key: value for key, value in deepcopy(sample.metadata).items() if key != START_ROLLOUT_ID}
    return Sample(sample.index, sample.group_index, sample.prompt, sample.prompt_ids, sample.label, metadata, sample.images)
