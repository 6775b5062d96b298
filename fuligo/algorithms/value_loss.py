"""Loss and fit of the value model. Axes: N response tokens of a packed micro-batch, R response tokens of a sample."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fuligo.types import MaskArray


@dataclass(slots=True)
class ValueTerms:
    """Value loss of every token."""

    loss: Tensor
    """[N] loss of each token, with gradient."""
    clipped: Tensor
    """[N] bool; True where the bound applies, so that the token has no gradient."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> ValueTerms:
    """Compute PPO's clipped squared error.

    loss = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), without PPO2's factor of 0.5, as in slime. A value that
    has moved by more than `clip` towards its return gets no gradient. Tensors are [N]; `values` has a gradient, and `old_values` are the
    values before the rollout's first optimizer step.
    """
    bounded = torch.clamp(values, old_values - clip, old_values + clip)
    errors, bounded_errors = (values - returns).square(), (bounded - returns).square()
    return ValueTerms(loss=torch.maximum(errors, bounded_errors), clipped=bounded_errors > errors)


@dataclass(slots=True, frozen=True)
class ValueFit:
    """Fit of a rollout's values to its returns, over all trained tokens."""

    value_mean: float
    return_mean: float
    explained_variance: float
    """1 - Var(returns - values) / Var(returns): 1 is a perfect fit, 0 no better than a constant; 0 if all returns are equal."""


def value_fit(values: Iterable[ArrayLike], returns: Iterable[ArrayLike], masks: Iterable[MaskArray]) -> ValueFit:
    """Measure how well the values from before training predicted the returns. The arguments hold one [R] array per sample."""
    chosen = [
        (np.asarray(v, np.float64)[m != 0], np.asarray(r, np.float64)[m != 0]) for v, r, m in zip(values, returns, masks, strict=True)
    ]
    if not any(len(v) for v, _ in chosen):
        return ValueFit(0.0, 0.0, 0.0)
    value, target = (np.concatenate(arrays) for arrays in zip(*chosen, strict=True))
    variance = target.var()
    explained = 1 - (target - value).var() / variance if variance > 0 else 0.0
    return ValueFit(float(value.mean()), float(target.mean()), float(explained))
