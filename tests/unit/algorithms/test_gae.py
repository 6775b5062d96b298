"""Generalized advantage estimation against its definition as a double sum, and against cases worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.algorithms.estimators.ppo import generalized_advantages
from fuligo.algorithms.value_loss import value_fit

DISCOUNT = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def by_definition(rewards: np.ndarray, values: np.ndarray, gamma: float, lambd: float) -> list[float]:
    """Schulman et al. 2016, equation 16: A_t = sum_l (gamma lambda)^l delta_{t+l}."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for s in range(t, len(rewards)):
            following = values[s + 1] if s + 1 < len(values) else 0.0
            total += (gamma * lambd) ** (s - t) * (rewards[s] + gamma * following - values[s])
        advantages.append(total)
    return advantages


@given(st.integers(0, 10_000), st.integers(1, 12), DISCOUNT, DISCOUNT)
def test_masked_tokens_are_as_if_they_were_not_there(seed: int, length: int, gamma: float, lambd: float):
    rng = np.random.default_rng(seed)
    mask = (rng.random(length) < 0.7).astype(np.int8)
    rewards, values = rng.standard_normal((2, length))
    values[mask == 0] = np.nan
    got = generalized_advantages(rewards, values, mask, gamma=gamma, lambd=lambd)
    np.testing.assert_allclose(got[mask != 0], by_definition(rewards[mask != 0], values[mask != 0], gamma, lambd), atol=1e-12)
    assert not got[mask == 0].any()


CASES = {
    # rewards, values, mask, gamma, lambda -> advantages
    "the reward at the end, less what was expected": ([0, 0, 1], [0.2, 0.5, 0.9], [1, 1, 1], 1, 1, [0.8, 0.5, 0.1]),
    "with lambda 0 what the next value adds": ([0, 0, 1], [0.2, 0.5, 0.9], [1, 1, 1], 1, 0, [0.3, 0.4, 0.1]),
    "discounted by gamma": ([0, 0, 1], [0, 0, 0], [1, 1, 1], 0.5, 1, [0.25, 0.5, 1]),
    "by gamma lambda": ([0, 0, 1], [0, 0, 0], [1, 1, 1], 0.5, 0.5, [0.0625, 0.25, 1]),
    "over tool output without a discount": ([0, 0, 0, 1], [0.4, 9, 9, 0], [1, 0, 0, 1], 0.5, 1, [0.1, 0, 0, 1]),
    "a masked end is no step": ([0, 1, 0], [0.5, 0.25, 9], [1, 1, 0], 1, 1, [0.5, 0.75, 0]),
    "nothing trained": ([0, 0], [1, 1], [0, 0], 1, 1, [0, 0]),
    "no response": ([], [], [], 1, 1, []),
}


@pytest.mark.parametrize(("rewards", "values", "mask", "gamma", "lambd", "expected"), CASES.values(), ids=CASES)
def test_cases_worked_out_by_hand(rewards, values, mask, gamma, lambd, expected):
    got = generalized_advantages(rewards, values, np.array(mask, np.int8), gamma=gamma, lambd=lambd)
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_explained_variance_is_1_for_the_returns_0_for_a_constant_and_negative_for_worse():
    returns, mask = [np.array([0.0, 1.0, 5.0]), np.array([2.0])], [np.array([1, 1, 0], np.int8), np.array([1], np.int8)]
    fits = [value_fit(values, returns, mask) for values in (returns, [np.full(3, 7.0), np.full(1, 7.0)], [-returns[0], -returns[1]])]
    assert [fit.explained_variance for fit in fits] == pytest.approx([1.0, 0.0, -3.0])
    assert [fit.value_mean for fit in fits] == pytest.approx([1.0, 7.0, -1.0])
    assert {fit.return_mean for fit in fits} == {1.0}
    alike = value_fit([np.array([0.5, 0.6])], [np.ones(2)], [np.ones(2, np.int8)])
    assert alike.explained_variance == 0, "nothing varies, nothing is explained"
    assert value_fit([np.ones(1)], [np.ones(1)], [np.zeros(1, np.int8)]).value_mean == 0
