"""Value loss against its formula, token by token."""

import pytest
import torch

from fuligo.algorithms.value_loss import value_loss

VALUES = torch.linspace(-1, 1, 21)


def clipped_square(value: float, old: float, target: float, clip: float) -> float:
    """Compute slime's max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2), without PPO2's factor of 0.5."""
    bounded = old + min(max(value - old, -clip), clip)
    return max((value - target) ** 2, (bounded - target) ** 2)


@pytest.mark.parametrize("target", [-2.0, -0.05, 0.0, 0.3, 2.0])
def test_loss_is_the_larger_square(target: float):
    old = torch.zeros(21)
    terms = value_loss(VALUES, old, torch.full((21,), target), 0.2)
    torch.testing.assert_close(terms.loss, torch.tensor([clipped_square(value, 0.0, target, 0.2) for value in VALUES.tolist()]))


def test_a_value_that_went_far_enough_towards_its_return_gets_no_gradient_and_all_others_that_of_the_squares():
    old, returns = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, -1.0])
    values = torch.tensor([0.0, 0.1, 0.5, 0.5], requires_grad=True)
    terms = value_loss(values, old, returns, 0.2)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -1.8, 0.0, 3.0]))
    assert terms.clipped.tolist() == [False, False, True, False]
