"""KL estimators: formulas, signs, and unbiasedness."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuligo.algorithms.kl import LOW_VAR_KL_LIMIT, kl_estimate

differences = st.floats(-50, 50)


def estimate(d, kind):
    return kl_estimate(torch.tensor([d], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), kind).item()


@pytest.mark.parametrize(("kind", "expected"), [("k1", -2), ("k2", 2), ("k3", 4.38905609893065), ("low_var_kl", 4.38905609893065)])
def test_formulas_at_a_log_ratio_of_minus_two(kind, expected):
    """k3 = exp(2) - 1 - 2."""
    assert estimate(-2.0, kind) == pytest.approx(expected)


@given(differences)
def test_k2_k3_and_low_var_kl_are_never_negative(d):
    assert estimate(d, "k2") >= 0
    assert estimate(d, "k3") >= -1e-12
    assert estimate(d, "low_var_kl") >= -1e-12


@given(differences)
def test_low_var_kl_is_k3_clamped(d):
    assert estimate(d, "low_var_kl") == pytest.approx(min(estimate(d, "k3"), LOW_VAR_KL_LIMIT), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("d", [-1000.0, -100.0, 100.0, 1000.0])
def test_low_var_kl_has_a_finite_gradient_of_zero_where_it_is_clamped(d):
    logprobs = torch.tensor([d], requires_grad=True)
    kl_estimate(logprobs, torch.zeros(1), "low_var_kl").backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


def distributions():
    torch.manual_seed(0)
    logits, reference, sampler = torch.randn(3, 6, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(0), sampler.log_softmax(0)


def expected_gradient(kind, *, unbiased, sampler, logits, reference):
    """Return the gradient of the estimate's expectation over tokens drawn from `sampler`, by enumerating the vocabulary."""
    logprobs = logits.log_softmax(0)
    kl = kl_estimate(logprobs, reference, kind, (logprobs - sampler).exp() if unbiased else None)
    return torch.autograd.grad((sampler.exp() * kl).sum(), logits)[0]


def true_gradient(logits, reference):
    logprobs = logits.log_softmax(0)
    return torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_on_policy(kind):
    logits, reference, _ = distributions()
    logprobs = logits.log_softmax(0)
    expectation = (logprobs.exp() * kl_estimate(logprobs, reference, kind)).sum()
    torch.testing.assert_close(expectation, (logprobs.exp() * (logprobs - reference)).sum())


def test_as_losses_on_policy_k1_has_no_expected_gradient_k2_that_of_the_kl_and_k3_that_of_the_reverse_kl():
    logits, reference, _ = distributions()
    policy = logits.detach().log_softmax(0)
    k1 = expected_gradient("k1", unbiased=False, sampler=policy, logits=logits, reference=reference)
    k2 = expected_gradient("k2", unbiased=False, sampler=policy, logits=logits, reference=reference)
    k3 = expected_gradient("k3", unbiased=False, sampler=policy, logits=logits, reference=reference)
    of_reverse = torch.autograd.grad(-(reference.exp() * logits.log_softmax(0)).sum(), logits)[0]
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-12, rtol=0)
    torch.testing.assert_close(k2, true_gradient(logits, reference))
    torch.testing.assert_close(k3, of_reverse)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_kl_has_the_gradient_of_the_kl_for_tokens_of_any_policy(kind):
    logits, reference, sampler = distributions()
    gradient = expected_gradient(kind, unbiased=True, sampler=sampler, logits=logits, reference=reference)
    torch.testing.assert_close(gradient, true_gradient(logits, reference))


@given(differences, st.floats(-20, 20))
def test_low_var_kl_clamps_the_product_with_the_ratio(d, log_ratio):
    """slime's order: a large estimate with a small ratio stays, a small one with a large ratio is clamped."""
    zero, ratio = torch.zeros(1, dtype=torch.float64), torch.tensor([log_ratio], dtype=torch.float64).exp()
    clamped = kl_estimate(torch.tensor([d], dtype=torch.float64), zero, "low_var_kl", ratio).item()
    assert clamped == pytest.approx(min(math.exp(log_ratio) * (math.exp(-d) - 1 + d), LOW_VAR_KL_LIMIT), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("d", [-1000.0, -60.0, -15.0, 15.0, 1000.0])
@pytest.mark.parametrize("log_ratio", [-20.0, 0.0, 20.0])
def test_low_var_kl_with_a_ratio_has_a_finite_gradient(d, log_ratio):
    logprobs = torch.tensor([d], requires_grad=True)
    kl_estimate(logprobs, torch.zeros(1), "low_var_kl", (logprobs - d + log_ratio).exp()).backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite()
