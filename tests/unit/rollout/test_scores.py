"""Scores of judged samples: the estimators against brute force, and the numbers that rewards and hooks report."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.config.groups import RewardFlags
from fuligo.rollout.metrics import pass_at_k, reported_means, sample_metrics
from fuligo.rollout.rewards import RewardRunner
from fuligo.rollout.rewards.custom import CustomReward
from fuligo.types import Sample, SampleGroup, SampleStatus


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_all_draws_of_k_samples_with_a_correct_one(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    draws = list(itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def finished(index: int, reward: float | dict[str, Any] | None, **metrics: float) -> Sample:
    sample = Sample(index, 0, "", np.zeros(2, np.int32), reward=reward, metrics=metrics, status=SampleStatus.COMPLETED)
    sample.response_ids = np.zeros(3, np.int32)
    sample.versions = np.zeros(3, np.int32)
    return sample


def test_a_training_rollout_reports_scores_per_prompt_whatever_a_filter_keeps() -> None:
    kept = SampleGroup(0, 0, [finished(0, 1.0), finished(1, 0.0)])
    dropped = SampleGroup(1, 1, [finished(2, 0.0), finished(3, 0.0)], kept=False, drop_reason="zero_std_0.0")
    unfinished = SampleGroup(2, 2, [finished(4, 1.0), Sample(5, 2, "", np.zeros(2, np.int32))], kept=False, drop_reason="aborted")
    metrics = sample_metrics([kept, dropped, unfinished], reward_key=None, policy_version=0)
    assert metrics["rollout/mean@2"] == 0.25
    assert metrics["rollout/pass@1"] == 0.25
    assert metrics["rollout/pass@2"] == 0.5


def test_a_dict_reward_passes_by_the_key_of_evaluations_and_is_averaged_by_its_own() -> None:
    rewards = [{"score": 0.93, "right": 1.0}, {"score": -0.07, "right": 0.0}, {"score": 1.0}, {"score": 0.5, "right": "yes"}]
    group = SampleGroup(0, 0, [finished(index, reward) for index, reward in enumerate(rewards)])
    metrics = sample_metrics([group], reward_key="score", pass_key="right", policy_version=0)
    assert metrics["rollout/mean@4"] == metrics["rollout/reward_mean"] == pytest.approx(0.59)
    assert metrics["rollout/pass@1"] == 0.5, "right, no answer, and by the score where there is no number under the key"
    assert sample_metrics([group], reward_key="score", policy_version=0)["rollout/pass@1"] == 0.25


def test_parts_of_a_split_response_are_one_sample_of_their_prompt() -> None:
    group = SampleGroup(0, 0, [finished(0, 1.0), finished(0, 1.0), finished(1, 0.0)])
    metrics = sample_metrics([group], reward_key=None, policy_version=0)
    assert metrics["rollout/mean@2"] == 0.5 and metrics["rollout/pass@2"] == 1.0


def test_parts_of_rewards_and_numbers_of_hooks_are_means_over_the_samples_that_have_them() -> None:
    samples = [
        finished(0, {"score": 1.0, "acc": True, "pred": "42"}, num_calls=2),
        finished(1, {"score": -1.0, "acc": False, "format": 0.5}, num_calls=4),
        finished(2, {"score": -1.0, "acc": False}),
    ]
    means = reported_means(samples)
    expected = {"reward/score": -1 / 3, "reward/acc": 1 / 3, "reward/format": 0.5, "sample/num_calls": 3.0}
    assert means == pytest.approx(expected)
    metrics = sample_metrics([SampleGroup(0, 0, samples)], reward_key="score", policy_version=0)
    assert {name: metrics[f"rollout/{name}"] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "many", None])
async def test_a_metric_that_is_no_finite_number_fails_its_sample(value: Any) -> None:
    async def reward(args: Any, sample: Sample) -> float:
        sample.metrics["num_calls"] = value
        return 1.0

    group = SampleGroup(0, 0, [finished(0, None)])
    async with RewardRunner(RewardFlags(), CustomReward(reward, None, 5.0)) as runner:
        await runner(group)
    assert group.samples[0].status is SampleStatus.FAILED and "metrics has 'num_calls'" in str(group.samples[0].error)


def test_right_answers_are_counted_without_further_rewards() -> None:
    """With a penalty of --extra-rm-path, a right answer stays below 1."""
    samples = [finished(at, right - 0.2, reward_main=right, reward_brief=-0.2) for at, right in enumerate([1.0, 0.0])]
    metrics = sample_metrics([SampleGroup(0, 0, samples)], reward_key=None, policy_version=0)
    assert metrics["rollout/mean@2"] == pytest.approx(0.3)
    assert metrics["rollout/pass@1"] == 0.5
