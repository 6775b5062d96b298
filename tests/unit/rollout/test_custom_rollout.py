"""`--rollout-function-path`: the user's function in place of the runner."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fuligo.errors import RolloutError
from fuligo.rollout.custom_generate import continue_sample
from fuligo.rollout.custom_rollout import CustomRollout
from fuligo.rollout.teacher import ServedTeacher
from fuligo.types import FloatArray, IntArray, SampleStatus
from tests.unit.rollout.scripted import World, samples_of, world


def custom(hook, *, teacher: ServedTeacher | None = None, reward_key: str | None = None, **flags: object) -> tuple[World, CustomRollout]:
    given = world(**flags)
    rollouts = CustomRollout(
        hook,
        SimpleNamespace(rollout_batch_size=2),
        replace(given.parts, policy_version=lambda: 3, reward_key=reward_key),
        teacher=teacher,
    )
    return given, rollouts


async def one_by_one(args, rollout_id, data_source, evaluation=False):
    """Draw one prompt more than needed, return it, and generate the others one after another."""
    *used, unused = data_source.get_samples(args.rollout_batch_size + 1)
    data_source.add_samples([unused])
    for sample in (sample for group in used for sample in group):
        await continue_sample(sample, {})
        sample.reward = 1.0
    return used


async def test_its_groups_are_the_rollout_and_what_it_hands_back_is_drawn_again():
    given, rollouts = custom(one_by_one)
    first, second = await rollouts.rollout(0), await rollouts.rollout(1)
    assert [group.row for group in first.kept] == [0, 1]
    assert [group.row for group in second.kept] == [2, 3]
    assert first.metrics["rollout/reward_mean"] == 1
    assert first.metrics["rollout/staleness"] == 3
    assert given.engine.most_running == 1
    assert second.state.next_group_index == 6


async def test_a_teacher_scores_what_it_returns():
    class Scorer:
        async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
            return np.full(len(input_ids) - num_given, -0.5, np.float32)

    _, rollouts = custom(one_by_one, teacher=ServedTeacher(Scorer(), timeout_s=9))
    samples = samples_of((await rollouts.rollout(0)).groups)
    assert all(sample.teacher_logprobs is not None and len(sample.teacher_logprobs) == sample.response_length for sample in samples)


def without_engine(args, rollout_id, data_source, evaluation=False):
    """Make rollouts in a plain function; one sample lacks log-probabilities, one is left pending."""
    groups = data_source.get_samples(2)
    for sample in (sample for group in groups for sample in group):
        sample.response_ids, sample.engine_logprobs = [1, 2], [-1.0, -2.0]
        sample.status, sample.reward = SampleStatus.COMPLETED, 0.5
    groups[0][0].engine_logprobs = []
    groups[1][0].status = SampleStatus.PENDING
    groups[1][1].reward = None
    return groups


async def test_samples_that_cannot_be_learnt_from_are_failed_with_the_reason():
    _, rollouts = custom(without_engine)
    rollout = await rollouts.rollout(0)
    lacks, fine, pending, unjudged = samples_of(rollout.groups)
    assert "without engine_logprobs" in (lacks.error or "")
    assert "returned the sample as pending" in (pending.error or "")
    assert "returned the sample without a reward" in (unjudged.error or "")
    assert fine.versions.tolist() == [3, 3]
    assert fine.engine_logprobs.dtype == np.float32
    assert rollout.metrics["rollout/num_failed"] == 3


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "good", np.float32("nan"), {"score": 1.0}])
async def test_a_reward_that_is_not_finite_fails_only_its_sample(reward):
    async def bad_reward(args, rollout_id, data_source, evaluation=False):
        groups = await one_by_one(args, rollout_id, data_source)
        groups[0][0].reward = reward
        return groups

    _, rollouts = custom(bad_reward, reward_key="acc")
    rollout = await rollouts.rollout(0)
    failed, *others = samples_of(rollout.groups)
    assert failed.status is SampleStatus.FAILED and "the reward that the function set must be a finite number" in (failed.error or "")
    assert all(sample.status is SampleStatus.COMPLETED for sample in others)
    assert rollout.metrics["rollout/reward_mean"] == 1 and rollout.metrics["rollout/num_failed"] == 1


@pytest.mark.parametrize("result", [None, [], [[]], {"a": 1}, [["text"]]], ids=str)
async def test_something_else_than_groups_is_refused(result):
    _, rollouts = custom(lambda args, rollout_id, data_source, evaluation=False: result)
    with pytest.raises(RolloutError, match="--rollout-function-path must return"):
        await rollouts.rollout(0)


async def test_a_function_that_raises_is_named():
    def raises(args, rollout_id, data_source, evaluation=False):
        raise LookupError("nothing here")

    _, rollouts = custom(raises)
    with pytest.raises(
        RolloutError,
        match=r"the function raised in rollout 4: LookupError: nothing here \(test_custom_rollout\.py:\d+\)",
    ):
        await rollouts.rollout(4)
