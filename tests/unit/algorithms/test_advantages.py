"""Advantages of groups, token returns and whitening, against their definitions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.estimators.ppo import generalized_advantages
from fuligo.algorithms.estimators.reinforce_plus_plus import discounted_returns
from fuligo.algorithms.rewards import Rewards, mean_of_others, std, token_rewards, whiten
from fuligo.algorithms.settings import STD_EPSILON, AdvantageSettings
from tests.random_samples import train_sample

rewards_of_a_group = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def group(rewards) -> Rewards:
    return Rewards([train_sample(index, 0, reward=reward) for index, reward in enumerate(rewards)])


def grpo(rewards):
    advantages = ESTIMATORS["grpo"].advantages(group(rewards), AdvantageSettings(samples_per_step=len(rewards)))
    return np.array([of_sample[0] for of_sample in advantages])


@given(rewards_of_a_group)
def test_grpo_advantages_sum_to_zero(rewards):
    assert grpo(rewards).sum() == pytest.approx(0, abs=1e-6)


@given(rewards_of_a_group, st.floats(-100, 100), st.floats(0.1, 10))
def test_grpo_does_not_see_shift_and_scale_of_rewards(rewards, shift, factor):
    assume(np.std(rewards) > 0.1)
    np.testing.assert_allclose(grpo(factor * np.array(rewards) + shift), grpo(rewards), rtol=1e-4, atol=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.randoms())
def test_every_estimator_with_a_group_baseline_is_independent_of_the_order_in_the_group(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    for estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        settings = AdvantageSettings(samples_per_step=len(rewards), divide_by_std=False)
        ordered, shuffled = (ESTIMATORS[estimator].advantages(group(each), settings) for each in (rewards, np.array(rewards)[order]))
        np.testing.assert_allclose(shuffled, np.array(ordered)[order], atol=1e-12)


def test_the_divisor_is_the_unbiased_deviation_plus_epsilon():
    assert std([0.0, 1.0]) == pytest.approx(np.sqrt(0.5) + STD_EPSILON)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1 / 3])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 12, 64])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_equal_rewards_give_exactly_no_advantage(estimator, reward, size):
    """The mean of equal values has a rounding error, which dividing by epsilon would turn into an advantage."""
    advantages = ESTIMATORS[estimator].advantages(group([reward] * size), AdvantageSettings(samples_per_step=size))
    assert not any(of_sample.any() for of_sample in advantages)


def test_equal_rewards_of_trajectories_in_several_samples_give_exactly_no_advantage():
    split = group([0.1] * 9)
    samples = [replace(sample, index=position // 3) for position, sample in enumerate(split.samples)]
    advantages = ESTIMATORS["grpo"].advantages(Rewards(samples), AdvantageSettings(samples_per_step=3))
    assert not any(of_sample.any() for of_sample in advantages)


def test_a_group_of_one_is_its_own_baseline_and_is_not_divided():
    one = group([3.0])
    assert one.group_mean(one.values) == one.mean_of_others(one.values) == [3.0]
    assert std([3.0]) == one.group_std(one.values, STD_EPSILON) == 1.0


@given(rewards_of_a_group)
def test_leave_one_out_is_the_mean_of_the_others(rewards):
    expected = [np.mean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    np.testing.assert_allclose(mean_of_others(rewards), expected, atol=1e-9)


@given(st.lists(st.floats(-5, 5), max_size=12), st.floats(0, 1), st.data())
def test_returns_are_discounted_sums_of_what_follows_among_trained_tokens(trained_rewards, gamma, data):
    expected = [sum(gamma ** (u - t) * r for u, r in enumerate(trained_rewards) if u >= t) for t in range(len(trained_rewards))]
    mask = np.array(data.draw(st.permutations([1] * len(trained_rewards) + [0] * 3)), np.int8)
    rewards = np.zeros(len(mask))
    rewards[mask != 0] = trained_rewards
    returns = discounted_returns(rewards, mask, gamma)
    np.testing.assert_allclose(returns[mask != 0], expected, atol=1e-9)
    assert not returns[mask == 0].any()


@given(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=12), st.floats(0, 1))
def test_reinforce_plus_plus_discounts_as_gae_without_values_does(mask, gamma):
    """Tool output between two turns discounts in neither."""
    loss_mask = np.array(mask, np.int8)
    rewards = token_rewards(1.0, loss_mask, np.zeros(len(mask)))
    by_gae = generalized_advantages(rewards, np.zeros(len(mask)), loss_mask, gamma=gamma, lambd=1.0)
    np.testing.assert_allclose(discounted_returns(rewards, loss_mask, gamma), by_gae, atol=1e-12)


def test_the_reward_stands_at_the_last_trained_token_and_kl_at_trained_tokens_only():
    penalty = [0.5, np.nan, 1.0, 50.0]
    np.testing.assert_allclose(token_rewards(3.0, np.array([1, 0, 1, 0], np.int8), penalty), [-0.5, 0, 3.0 - 1.0, 0])


def test_a_fully_masked_sample_has_no_token_rewards():
    np.testing.assert_array_equal(token_rewards(3.0, np.zeros(2, np.int8), [1.0, 1.0]), [0, 0])


samples_with_masks = st.lists(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 1)), max_size=8).map(
        lambda pairs: (np.array([value for value, _ in pairs]), np.array([bit for _, bit in pairs], np.int8))
    ),
    max_size=6,
)


@given(samples_with_masks)
def test_whitened_tokens_have_mean_zero_and_variance_one(samples):
    values, masks = [value for value, _ in samples], [mask for _, mask in samples]
    trained = np.concatenate([np.empty(0), *(value[mask != 0] for value, mask in samples)])
    assume(len(trained) > 1 and trained.std() > 0.1)
    whitened = whiten(values, masks)
    flat = np.concatenate([value[mask != 0] for value, mask in zip(whitened, masks)])
    assert flat.mean() == pytest.approx(0, abs=1e-6)
    assert flat.var(ddof=1) == pytest.approx(1, rel=1e-4)


def test_masked_tokens_neither_count_in_whitening_nor_come_out_of_it():
    masks = [np.array([1, 0], np.int8), np.array([1, 1], np.int8)]
    clean = whiten([np.array([1.0, 0.0]), np.array([2.0, 3.0])], masks)
    dirty = whiten([np.array([1.0, 1e9]), np.array([2.0, 3.0])], masks)
    np.testing.assert_array_equal(np.concatenate(clean), np.concatenate(dirty))
    assert dirty[0][1] == 0


def test_whitening_nothing_gives_nothing():
    assert whiten([], []) == []
    np.testing.assert_array_equal(whiten([np.array([5.0])], [np.array([0], np.int8)])[0], [0])
    np.testing.assert_array_equal(whiten([np.array([5.0])], [np.array([1], np.int8)])[0], [0])
