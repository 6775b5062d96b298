"""Policy losses: clipping, gradients, and equality to the policy gradient on policy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.policy_loss import Clip, Segments

ppo_loss, gspo_loss, cispo_loss = (ESTIMATORS[name].policy_loss for name in ("ppo", "gspo", "cispo"))
ONE_TOKEN = Segments(torch.ones(1), torch.zeros(1, dtype=torch.int64), 1)
ratios, signed = st.floats(0.05, 20), st.floats(-5, 5)


def terms_and_gradient(loss, ratio, advantage, clip):
    """Return the loss of one token with the given pi / pi_old, and d loss / d logprob."""
    logprobs = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    terms = loss(logprobs, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), clip, ONE_TOKEN)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    return terms, gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.5, 1, True),
        (1.5, -1, False),
        (0.5, 1, False),
        (0.5, -1, True),
        (1.25, 1, False),
        (0.85, -1, False),
        (1.0, 1, False),
        (1.5, 0, False),
    ],
)
def test_ppo_has_no_gradient_exactly_where_it_clips(ratio, advantage, clipped):
    """A token is clipped once it has moved far enough in the direction of its advantage; 1.25 is within 1 + 0.28."""
    terms, gradient = terms_and_gradient(ppo_loss, ratio, advantage, Clip(low=0.2, high=0.28))
    assert terms.clipped.item() == clipped
    assert gradient == pytest.approx(0 if clipped else -ratio * advantage)


@given(ratios, signed)
def test_ppo_is_the_pessimistic_of_both(ratio, advantage):
    terms, _ = terms_and_gradient(ppo_loss, ratio, advantage, Clip(0.2, 0.2))
    bounded = min(max(ratio, 0.8), 1.2)
    assert terms.loss.item() == pytest.approx(max(-ratio * advantage, -bounded * advantage))


@given(ratios, signed)
def test_dual_clip_bounds_the_loss_of_negative_advantages_and_touches_no_other(ratio, advantage):
    dual, _ = terms_and_gradient(ppo_loss, ratio, advantage, Clip(0.2, 0.2, dual=3.0))
    plain, _ = terms_and_gradient(ppo_loss, ratio, advantage, Clip(0.2, 0.2))
    if advantage >= 0:
        assert dual.loss.item() == plain.loss.item()
    else:
        assert dual.loss.item() == pytest.approx(min(plain.loss.item(), 3.0 * -advantage))


def test_dual_clip_leaves_no_gradient_where_it_is_in_force():
    terms, gradient = terms_and_gradient(ppo_loss, 4.0, -1.0, Clip(0.2, 0.2, dual=3.0))
    assert (terms.loss.item(), terms.clipped.item(), gradient) == (3.0, True, 0.0)


def test_a_ratio_beyond_float_range_times_no_advantage_is_no_loss():
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss = ppo_loss(logprobs, torch.tensor([-1000.0]), torch.zeros(1), Clip(), ONE_TOKEN).loss
    loss.sum().backward()
    assert loss.item() == 0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


@given(ratios, signed)
def test_cispo_is_reinforce_with_a_clipped_weight_and_every_token_keeps_a_gradient(ratio, advantage):
    terms, gradient = terms_and_gradient(cispo_loss, ratio, advantage, Clip(low=1.0, high=3.0))
    weight = min(ratio, 4.0)
    assert gradient == pytest.approx(-weight * advantage)
    assert terms.loss.item() == pytest.approx(gradient * math.log(ratio), abs=1e-9)
    assert terms.clipped.item() == (ratio > 4.0)


def two_samples():
    """Return two samples of three and two tokens, one token of each masked, in one packed row."""
    torch.manual_seed(0)
    mask = torch.tensor([1, 1, 0, 1, 0])
    segments = Segments(mask, torch.tensor([0, 0, 0, 1, 1]), 2)
    logprobs = (0.3 * torch.randn(5, dtype=torch.float64)).requires_grad_()
    return logprobs, 0.3 * torch.randn(5, dtype=torch.float64), segments


def test_the_ratio_of_gspo_is_the_geometric_mean_over_the_samples_trained_tokens():
    logprobs, old, segments = two_samples()
    d = (logprobs - old).detach()
    first, second = d[:2].mean().exp().item(), d[3].exp().item()
    terms = gspo_loss(logprobs, old, torch.ones(5), Clip(), segments)
    assert terms.ratio.tolist() == pytest.approx([first, first, first, second, second])


def test_the_gradient_of_gspo_is_that_of_the_papers_sequence_objective():
    """min(s A, clip(s) A) with s = exp(mean log-ratio), differentiated as it stands."""
    logprobs, old, segments = two_samples()
    advantages = torch.tensor([0.7, 0.7, 0.7, -1.3, -1.3], dtype=torch.float64)
    weights = torch.tensor([1 / 2, 1 / 2, 0, 1, 0], dtype=torch.float64)
    loss = (weights * gspo_loss(logprobs, old, advantages, Clip(10, 10), segments).loss).sum()
    first, second = (logprobs - old)[:2].mean().exp(), (logprobs - old)[3].exp()
    by_sequence = -(first * 0.7 + second * -1.3)
    torch.testing.assert_close(loss, by_sequence)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs), torch.autograd.grad(by_sequence, logprobs))


def test_gspo_clips_all_tokens_of_a_sample_together():
    logprobs = torch.tensor([2.0, -0.2, 0.0], requires_grad=True)
    segments = Segments(torch.ones(3), torch.tensor([0, 0, 1]), 2)
    terms = gspo_loss(logprobs, torch.zeros(3), torch.ones(3), Clip(0.2, 0.2), segments)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    assert terms.clipped.tolist() == [True, True, False]
    assert gradient.tolist() == [0, 0, -1]


@pytest.mark.parametrize("loss", [ppo_loss, gspo_loss, cispo_loss])
def test_on_policy_all_surrogates_have_the_gradient_of_the_policy_gradient(loss):
    logprobs, _, segments = two_samples()
    advantages = torch.randn(5, dtype=torch.float64)
    terms = loss(logprobs, logprobs.detach(), advantages, Clip(), segments)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages)
    assert terms.ratio.tolist() == [1] * 5
    assert not terms.clipped.any()
