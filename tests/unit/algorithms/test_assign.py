"""Assignment of advantages to tokens and of samples to optimizer steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.algorithms.assign import assign_advantages, cut_into_steps
from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.errors import TrainerError
from tests.random_samples import random_samples, train_sample


def advantages(samples, estimator="grpo", **settings):
    """Return one advantage per sample; these estimators give all tokens of a sample the same one."""
    batch = assign_advantages(samples, AdvantageSettings(samples_per_step=len(samples), estimator=estimator, **settings))
    for sample in batch.samples:
        assert sample.advantages.shape == (sample.response_length,)
        assert sample.advantages.dtype == np.float32
        assert len(set(sample.advantages.tolist())) == 1
    return [float(sample.advantages[0]) for sample in batch.samples]


def group(*rewards, group_index=0, first_index=0):
    return [train_sample(first_index + i, group_index, reward=reward) for i, reward in enumerate(rewards)]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_normalization(estimator):
    rewards = np.array([0.0, 1.0, 1.0, 4.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert advantages(group(*rewards), estimator) == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("estimator", "settings", "expected"),
    [
        ("grpo", {"divide_by_std": False}, [-1.5, -0.5, -0.5, 2.5]),
        ("grpo", {"normalize_rewards": False}, [0, 1, 1, 4]),
        ("rloo", {}, [-2, -2 / 3, -2 / 3, 10 / 3]),
        ("rloo", {"normalize_rewards": False}, [0, 1, 1, 4]),
        ("reinforce_plus_plus_baseline", {}, [-1.5, -0.5, -0.5, 2.5]),
        ("reinforce_plus_plus", {}, [0, 1, 1, 4]),
    ],
)
def test_each_estimator_by_hand(estimator, settings, expected):
    assert advantages(group(0, 1, 1, 4), estimator, **settings) == pytest.approx(expected)


def test_groups_do_not_see_each_other():
    alone = advantages(group(0, 1))
    assert advantages(group(0, 1) + group(100, 700, 300, group_index=1, first_index=2))[:2] == alone


def test_a_group_that_lost_samples_is_normalized_over_those_it_has():
    """Counting lost samples as zeros, or dividing by a fixed group size, would give other numbers."""
    survivors = group(1, 2, 6)
    rewards = np.array([1.0, 2.0, 6.0])
    expected = (rewards - 3) / (rewards.std(ddof=1) + 1e-6)
    assert advantages(survivors + group(0, 1, 0, 1, group_index=1, first_index=3))[:3] == pytest.approx(expected.tolist())


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_no_advantage(estimator):
    assert advantages(group(7), estimator) == [0.0]


def test_fully_masked_samples_count_in_their_groups_statistics():
    """A truncated sample's tokens may be masked, but its reward still tells how hard the prompt is."""
    samples = group(0, 1)
    samples.append(train_sample(2, 0, reward=0, loss_mask=[0, 0]))
    rewards = np.array([0.0, 1.0, 0.0])
    expected = (rewards - 1 / 3) / (rewards.std(ddof=1) + 1e-6)
    assert advantages(samples) == pytest.approx(expected.tolist())


@given(st.integers(0, 100), st.randoms())
def test_the_order_of_samples_does_not_matter(seed, random):
    samples = random_samples(seed)
    by_index = dict(zip([sample.index for sample in samples], advantages(samples)))
    shuffled = random_samples(seed)
    random.shuffle(shuffled)
    assert dict(zip([sample.index for sample in shuffled], advantages(shuffled))) == pytest.approx(by_index, abs=1e-6)


def test_samples_split_from_one_rollout_count_once_in_the_statistics():
    parts = [train_sample(0, 0, reward=1), train_sample(0, 0, reward=1), train_sample(0, 0, reward=1)]
    others = [train_sample(1, 0, reward=0), train_sample(2, 0, reward=0)]
    whole = advantages([train_sample(0, 0, reward=1), *others])
    assert advantages([*parts, *others]) == pytest.approx([whole[0]] * 3 + whole[1:])


def test_reinforce_plus_plus_discounts_back_from_the_last_trained_token():
    sample = train_sample(0, 0, reward=2, loss_mask=[1, 1, 1, 0])
    assign_advantages([sample], AdvantageSettings(samples_per_step=1, estimator="reinforce_plus_plus", gamma=0.5))
    np.testing.assert_allclose(sample.advantages, [0.5, 1, 2, 0])


def test_reinforce_plus_plus_takes_kl_off_every_trained_token():
    sample = train_sample(0, 0, reward=2, loss_mask=[1, 0, 1])
    sample.old_logprobs, sample.ref_logprobs = np.float32([-1, -1, -1]), np.float32([-2, -9, -1.5])
    assign_advantages([sample], AdvantageSettings(samples_per_step=1, estimator="reinforce_plus_plus", kl_coef=0.1))
    np.testing.assert_allclose(sample.advantages, [2 - 0.05 - 0.1, 0, 2 - 0.05], rtol=1e-6)


def test_rloo_takes_the_kl_of_the_samples_trained_tokens_off_its_reward():
    samples = [train_sample(index, 0, reward=1, loss_mask=[1, 0, 1]) for index in range(2)]
    for sample, ref in zip(samples, ([-2, -50, -2], [-1, -1, -1])):
        sample.old_logprobs, sample.ref_logprobs = np.full(3, -1, np.float32), np.float32(ref)
    assert advantages(samples, "rloo", kl_coef=0.1) == pytest.approx([-0.2, 0.2])


def test_rloo_takes_the_kl_of_a_split_rollout_off_all_its_parts():
    samples = [train_sample(0, 0, reward=1), train_sample(0, 0, reward=1), train_sample(1, 0, reward=1)]
    for sample, ref in zip(samples, (-2.0, -1.0, -1.0)):
        sample.old_logprobs, sample.ref_logprobs = np.full(3, -1, np.float32), np.full(3, ref, np.float32)
    assert advantages(samples, "rloo", kl_coef=0.1) == pytest.approx([-0.3, -0.3, 0.3])


def test_ppo_learns_what_the_values_did_not_foresee_and_the_value_model_learns_what_came():
    sample = train_sample(0, 0, reward=2, loss_mask=[1, 0, 1])
    sample.old_logprobs, sample.ref_logprobs = np.float32([-1, -1, -1]), np.float32([-2, -9, -1.5])
    sample.values = np.float32([0.5, np.nan, 1.5])
    settings = AdvantageSettings(samples_per_step=1, estimator="ppo", kl_coef=0.1, gamma=0.5, lambd=0.5)
    assign_advantages([sample], settings)
    rewards = [-0.1, 2 - 0.05]
    last = rewards[1] - 1.5
    first = rewards[0] + 0.5 * 1.5 - 0.5 + 0.25 * last
    np.testing.assert_allclose(sample.advantages, [first, 0, last], rtol=1e-6)
    np.testing.assert_allclose(sample.returns, [first + 0.5, 0, last + 1.5], rtol=1e-6)


def test_neither_whitening_nor_a_custom_function_touches_the_returns():
    settings = AdvantageSettings(samples_per_step=12, estimator="ppo", gamma=0.9, lambd=0.95)
    plain = assign_advantages(random_samples(0), settings).samples
    changes = ({"whiten": True}, {"custom": lambda samples: [sample.returns * 2 for sample in samples]})
    whitened, custom = (assign_advantages(random_samples(0), replace(settings, **change)).samples for change in changes)
    for sample, white, own in zip(plain, whitened, custom, strict=True):
        np.testing.assert_array_equal(sample.returns, white.returns)
        np.testing.assert_array_equal(sample.returns, own.returns)
        np.testing.assert_allclose(own.advantages, sample.returns * 2)
    assert any(not np.allclose(a.advantages, b.advantages) for a, b in zip(plain, whitened, strict=True))


def test_kl_coef_needs_log_probabilities():
    sample = train_sample(0, 0)
    sample.ref_logprobs = None
    with pytest.raises(TrainerError, match="--kl-coef for sample 0: it has no reference log-probabilities"):
        assign_advantages([sample], AdvantageSettings(samples_per_step=1, estimator="rloo", kl_coef=0.1))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_coef_changes_advantages_exactly_where_it_is_said_to_be_supported(estimator):
    assert ESTIMATORS[estimator].uses_kl_coef == (estimator in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"))
    settings = AdvantageSettings(samples_per_step=12, estimator=estimator)
    without = assign_advantages(random_samples(0), settings)
    settings = AdvantageSettings(samples_per_step=12, estimator=estimator, kl_coef=0.5)
    shaped = assign_advantages(random_samples(0), settings)
    equal = all(np.array_equal(a.advantages, b.advantages) for a, b in zip(without.samples, shaped.samples))
    assert equal != ESTIMATORS[estimator].uses_kl_coef


def test_whitening_goes_over_the_tokens_of_the_whole_rollout_not_of_a_step():
    batch = assign_advantages(
        random_samples(1), AdvantageSettings(samples_per_step=4, num_steps=3, estimator="reinforce_plus_plus_baseline", whiten=True)
    )
    tokens = np.concatenate([sample.advantages[sample.loss_mask != 0] for sample in batch.samples])
    assert tokens.mean() == pytest.approx(0, abs=1e-5)
    assert tokens.std(ddof=1) == pytest.approx(1, rel=1e-4)


def test_a_custom_function_replaces_the_estimator():
    samples = random_samples(0)
    settings = AdvantageSettings(samples_per_step=12, custom=lambda samples: [np.arange(s.response_length) for s in samples])
    for sample in assign_advantages(samples, settings).samples:
        np.testing.assert_array_equal(sample.advantages, np.arange(sample.response_length))


def test_a_custom_function_that_returns_wrong_lengths_is_named():
    with pytest.raises(TrainerError, match=r"shape \(2,\) for sample 0, which has 3 response tokens"):
        assign_advantages(group(1, 2), AdvantageSettings(samples_per_step=2, custom=lambda samples: [np.zeros(2)] * 2))
    with pytest.raises(TrainerError, match="for 1 sample; return a list with one array for each of the 2 samples"):
        assign_advantages(group(1, 2), AdvantageSettings(samples_per_step=2, custom=lambda samples: [np.zeros(3)]))
    with pytest.raises(TrainerError, match=r"non-finite advantage \(NaN or infinity\) for sample 1"):
        assign_advantages(group(1, 2), AdvantageSettings(samples_per_step=2, custom=lambda samples: [np.zeros(3), np.full(3, np.nan)]))
    with pytest.raises(TrainerError, match="must return a list of arrays of numbers: could not convert string"):
        assign_advantages(group(1, 2), AdvantageSettings(samples_per_step=2, custom=lambda samples: ["good", "bad"]))
    with pytest.raises(TrainerError, match="returned None; return a list"):
        assign_advantages(group(1, 2), AdvantageSettings(samples_per_step=2, custom=lambda samples: None))


@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_steps_are_consecutive_and_use_every_rollout_once(num_steps, samples_per_step, data):
    num_rollouts = data.draw(st.integers(num_steps, num_steps * samples_per_step))
    parts = data.draw(st.lists(st.integers(1, 3), min_size=num_rollouts, max_size=num_rollouts))
    samples = [train_sample(index, 0) for index, count in enumerate(parts) for _ in range(count)]
    steps, counts = cut_into_steps(samples, samples_per_step=samples_per_step, num_steps=num_steps)
    assert [position for step in steps for position in step] == list(range(len(samples)))
    assert [len({samples[position].index for position in step}) for step in steps] == counts
    assert sum(counts) == num_rollouts
    assert max(counts) <= samples_per_step
    assert max(counts) - min(counts) <= 1
    if num_rollouts == num_steps * samples_per_step:
        assert counts == [samples_per_step] * num_steps


def test_sizes_that_contradict_are_errors():
    with pytest.raises(TrainerError, match=r"4 samples in 1 optimizer step of 3 \(--global-batch-size\)"):
        cut_into_steps(group(1, 2, 3, 4), samples_per_step=3, num_steps=1)
    with pytest.raises(TrainerError, match="cannot train on a rollout without usable samples"):
        cut_into_steps([], samples_per_step=3, num_steps=2)


def test_a_rollout_with_fewer_samples_than_steps_takes_fewer_steps(caplog):
    assert cut_into_steps(group(1, 2), samples_per_step=3, num_steps=4) == ([[0], [1]], [1, 1])
    assert [record.getMessage() for record in caplog.records] == [
        "the rollout has only 2 usable samples; taking one optimizer step per sample instead of 4 steps"
    ]
