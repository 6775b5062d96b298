"""Weights of tokens: both denominators, by hand and as sums over a step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.algorithms.assign import StepDenominators, assign_advantages, step_denominators, token_weights
from fuligo.algorithms.settings import AdvantageSettings
from tests.random_samples import random_samples, train_sample


def weights_of(samples, *, per_token):
    batch = assign_advantages(samples, AdvantageSettings(samples_per_step=len(samples)))
    return [token_weights(sample, step_denominators(batch, 0), per_token=per_token).tolist() for sample in samples]


def test_by_default_samples_weigh_alike_and_the_per_token_loss_weighs_tokens_alike():
    samples = [train_sample(0, 0, loss_mask=[1, 1]), train_sample(1, 0, loss_mask=[1, 0, 1, 1, 1])]
    assert weights_of(samples, per_token=False) == [pytest.approx([1 / 4] * 2), pytest.approx([1 / 8, 0, 1 / 8, 1 / 8, 1 / 8])]
    assert weights_of(samples, per_token=True) == [pytest.approx([1 / 6] * 2), pytest.approx([1 / 6, 0, 1 / 6, 1 / 6, 1 / 6])]


def test_a_fully_masked_sample_counts_as_a_sample_but_has_no_tokens():
    samples = [train_sample(0, 0, loss_mask=[1, 1]), train_sample(1, 0, loss_mask=[0, 0])]
    assert weights_of(samples, per_token=False) == [pytest.approx([1 / 4] * 2), [0, 0]]
    assert weights_of(samples, per_token=True) == [pytest.approx([1 / 2] * 2), [0, 0]]


def test_samples_split_from_one_rollout_share_its_denominator():
    """Each token keeps its weight when its rollout is split."""
    whole = [train_sample(0, 0, loss_mask=[1, 1, 1]), train_sample(1, 0, loss_mask=[1])]
    parts = [train_sample(0, 0, loss_mask=[1, 1]), train_sample(0, 0, loss_mask=[1]), train_sample(1, 0, loss_mask=[1])]
    parts[0].mask_sum = parts[1].mask_sum = 3
    weights_of_parts, weights_of_whole = (np.concatenate(weights_of(samples, per_token=False)) for samples in (parts, whole))
    np.testing.assert_allclose(weights_of_parts, weights_of_whole)


def test_steps_have_their_own_denominators():
    samples = [train_sample(i, 0, loss_mask=[1] * (i + 1)) for i in range(4)]
    batch = assign_advantages(samples, AdvantageSettings(samples_per_step=2, num_steps=2))
    assert [step_denominators(batch, step) for step in range(2)] == [StepDenominators(2, 3), StepDenominators(2, 7)]


@given(st.integers(0, 200), st.booleans())
def test_the_weights_of_a_step_add_up_to_the_share_of_samples_that_have_tokens(seed, per_token):
    samples = random_samples(seed)
    with_tokens = [sample.loss_mask.any() for sample in samples]
    total = sum(np.sum(weights) for weights in weights_of(samples, per_token=per_token))
    assert total == pytest.approx(1 if per_token else np.mean(with_tokens), rel=1e-5)
