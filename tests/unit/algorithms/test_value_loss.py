"""Value loss against PPO2's formula, token by token."""

from __future__ import annotations

import pytest
import torch

from fuligo.algorithms.value_loss import value_loss

VALUES = torch.linspace(-1, 1, 21)


def ppo2(value: float, old: float, target: float, clip: float) -> float:
    """Compute OpenAI baselines' ppo2: vf_loss = .5 * max((vpred - R)^2, (OLDVPRED + clip(vpred - OLDVPRED, -c, c) - R)^2)."""
    bounded = old + min(max(value - old, -clip), clip)
    return 0.5 * max((value - target) ** 2, (bounded - target) ** 2)


@pytest.mark.parametrize("target", [-2.0, -0.05, 0.0, 0.3, 2.0])
def test_loss_is_ppo2s(target: float):
    old = torch.zeros(21)
    terms = value_loss(VALUES, old, torch.full((21,), target), 0.2)
    torch.testing.assert_close(terms.loss, torch.tensor([ppo2(value, 0.0, target, 0.2) for value in VALUES.tolist()]))


def test_a_value_that_went_far_enough_towards_its_return_gets_no_gradient_and_all_others_the_squares():
    old, returns = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, -1.0])
    values = torch.tensor([0.0, 0.1, 0.5, 0.5], requires_grad=True)
    terms = value_loss(values, old, returns, 0.2)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -0.9, 0.0, 1.5]))
    assert terms.clipped.tolist() == [False, False, True, False]
