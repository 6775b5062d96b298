"""Partial rollouts: an interrupted response continues in a later rollout with its tokens, log-probabilities and versions."""

import numpy as np
import pytest

from fuligo.errors import HookError
from fuligo.rollout.protocol import Rollout
from fuligo.rollout.source import GroupSource
from fuligo.types import SampleStatus
from tests.unit.rollout.scripted import Rows, ScriptedEngine, World, by_row, rows_where, samples_of, token, world


async def interrupted(**flags: object) -> tuple[World, Rollout]:
    """Run rollout 0: rows 0 and 2 are kept, row 1 is in the buffer with both samples begun, weights are at version 1."""
    given = world(
        engine=ScriptedEngine(by_row({1: 120}), version=0),
        over_sampling_batch_size=3,
        partial_rollout=True,
        **flags,
    )
    rollout = await given.runner.rollout(0)
    given.engine.version = 1
    return given, rollout


async def test_an_interrupted_group_goes_to_the_buffer_as_it_stands():
    given, rollout = await interrupted()
    assert rows_where(rollout.groups, "aborted") == [1]
    (group,) = rollout.state.buffer
    assert group.row == 1
    for sample in group.samples:
        assert sample.status is SampleStatus.ABORTED
        assert 0 < sample.response_length < 120
        assert len(sample.versions) == len(sample.engine_logprobs) == len(sample.loss_mask) == sample.response_length
    assert given.rows.returned == [], "its prompt is in the buffer, not in the order too"


async def test_it_is_drawn_first_and_continues_where_it_stopped():
    given, first = await interrupted()
    begun = {sample.index: sample.response_length for sample in samples_of(first.state.buffer)}
    given.engine.lengths = by_row({1: 40, 4: 300})

    second = await given.runner.rollout(1)

    assert [group.row for group in second.groups] == [1, 3, 4]
    assert second.metrics["rollout/num_resumed"] == 2
    resumed = second.groups[0]
    assert resumed.index == first.state.buffer[0].index, "it is the same group"
    for sample in resumed.samples:
        assert sample.response_ids.tolist() == [token(sample.index, position) for position in range(40)]
        assert sample.versions.tolist() == [0] * begun[sample.index] + [1] * (40 - begun[sample.index])
        assert sample.response == " ".join(map(str, sample.response_ids)), "decoded from all ids"
        assert sample.metadata["start_rollout_id"] == 0
        assert sample.loss_mask.all()
    new_tokens = sum(sample.response_length for sample in samples_of(second.groups)) - sum(begun.values())
    assert second.metrics["rollout/num_tokens"] == new_tokens


async def test_finished_samples_of_an_unfinished_group_are_not_sampled_again():
    engine = ScriptedEngine(lambda row, index: 120 if index == 3 else 5)
    given = world(engine=engine, over_sampling_batch_size=3, partial_rollout=True)
    first = await given.runner.rollout(0)
    finished, unfinished = first.state.buffer[0].samples
    assert (finished.status, unfinished.status) == (SampleStatus.COMPLETED, SampleStatus.ABORTED)
    assert finished.reward is None, "the group is judged when it is whole"

    engine.requests.clear()
    engine.lengths = lambda row, index: 30
    second = await given.runner.rollout(1)

    assert second.metrics["rollout/num_resumed"] == 1
    assert [rid.split("-")[0] for rid, _ in engine.requests if rid.split("-")[0] in "23"] == ["3"]
    assert second.kept[0].samples[0].response_ids.tolist() == finished.response_ids.tolist()
    assert second.kept[0].samples[0].reward is not None


async def test_a_continued_sample_may_only_fill_what_is_left_of_its_length():
    given, _ = await interrupted(rollout_max_response_len=130)
    given.engine.lengths = by_row({1: 10_000})
    second = await given.runner.rollout(1)
    while not any(group.row == 1 for group in second.kept):
        second = await given.runner.rollout(second.step + 1)
    sample = next(group for group in second.kept if group.row == 1).samples[0]
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.response_length == 130


async def test_tokens_of_an_earlier_rollout_can_be_kept_out_of_the_loss():
    given, first = await interrupted(mask_offpolicy_in_partial_rollout=True)
    begun = first.state.buffer[0].samples[0].response_length
    given.engine.lengths = by_row({1: 40, 4: 300})
    second = await given.runner.rollout(1)
    mask = next(group for group in second.groups if group.row == 1).samples[0].loss_mask
    assert mask.tolist() == [0] * begun + [1] * (40 - begun)


async def test_groups_that_began_too_many_versions_ago_start_over():
    given, _ = await interrupted(max_staleness=1)
    given.engine.version = 2
    second = await given.runner.rollout(1)
    assert second.metrics["rollout/num_groups_stale"] == 1
    assert second.metrics["rollout/num_resumed"] == 0
    again = next(group for group in second.groups if group.row == 1)
    assert again.index == 3, "a new group of the same prompt"
    assert all((sample.versions == 2).all() for sample in again.samples)


async def test_as_old_as_allowed_is_continued():
    given, _ = await interrupted(max_staleness=1)
    assert (await given.runner.rollout(1)).metrics["rollout/num_groups_stale"] == 0


async def test_continuing_does_not_reach_back_into_the_saved_state_or_the_record():
    given, first = await interrupted()
    before = [sample.response_ids.copy() for sample in samples_of(first.state.buffer)]
    await given.runner.rollout(1)
    assert all(map(np.array_equal, before, [sample.response_ids for sample in samples_of(first.state.buffer)]))
    assert first.groups[1].drop_reason == "aborted"


async def test_a_resume_from_the_state_continues_the_same_groups():
    given, first = await interrupted()
    uninterrupted = await given.runner.rollout(1)
    resumed = world(
        engine=ScriptedEngine(given.engine.lengths, version=1), state=first.state, over_sampling_batch_size=3, partial_rollout=True
    )
    again = await resumed.runner.rollout(1)
    assert [group.index for group in again.groups] == [group.index for group in uninterrupted.groups]
    for one, other in zip(samples_of(again.kept), samples_of(uninterrupted.kept), strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.versions.tolist() == other.versions.tolist()


class TestBufferFilter:
    """`--buffer-filter-path` chooses the groups to continue; it cannot lose a prompt."""

    async def source(self, choose) -> GroupSource:
        given = world(engine=ScriptedEngine(by_row({1: 300, 2: 300})), over_sampling_batch_size=4, partial_rollout=True)
        state = (await given.runner.rollout(0)).state
        source = GroupSource(Rows(), 2, partial_rollout=True, buffer_filter=choose)
        source.restore(state)
        return source

    async def test_it_may_choose_any_group(self):
        source = await self.source(lambda rollout_id, buffer, num_groups: [buffer.pop()])
        assert [group.row for group in source.draw(2, 1, 0).groups] == [2, 4]
        assert [group.row for group in source.state(1).buffer] == [1]

    async def test_what_it_returns_leaves_the_buffer_also_when_it_forgets_to_remove_it(self):
        source = await self.source(lambda rollout_id, buffer, num_groups: buffer[:1])
        assert [group.row for group in source.draw(2, 1, 0).groups] == [1, 4]
        assert [group.row for group in source.state(1).buffer] == [2]

    async def test_groups_it_removes_without_returning_them_start_over(self):
        def choose(rollout_id, buffer, num_groups):
            buffer.clear()
            return []

        source = await self.source(choose)
        groups = source.draw(3, 1, 0).groups
        assert [group.row for group in groups] == [1, 2, 4]
        assert all(sample.response_length == 0 for sample in samples_of(groups))

    @pytest.mark.parametrize("result", [lambda buffer: buffer, lambda buffer: [buffer[0], buffer[0]]], ids=["too many", "one twice"])
    async def test_what_cannot_be_used_once_each_is_refused(self, result):
        source = await self.source(lambda rollout_id, buffer, num_groups: list(result(buffer)))
        with pytest.raises(HookError, match=r"--buffer-filter-path: .* it must return at most 1 of the buffered"):
            source.draw(1, 1, 0)
