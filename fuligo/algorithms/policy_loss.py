"""PPO's clipped surrogate, per token. Axes: N response tokens of a packed micro-batch. Loads no torch.

Advantages carry no gradient. `aggregate` averages over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuligo.algorithms.ratio import exp_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, frozen=True)
class Clip:
    """Bounds of the probability ratio."""

    low: float = 0.2
    """Lower bound of the ratio: 1 - low."""
    high: float = 0.2
    """Upper bound of the ratio: 1 + high; larger than `low` is DAPO's clip-higher."""
    dual: float | None = None
    """> 1: bounds the loss at dual * |advantage| where the advantage is negative; None: no such bound."""


@dataclass(slots=True)
class PolicyTerms:
    """Policy loss of every token."""

    loss: Tensor
    """[N] with gradient."""
    ratio: Tensor
    """[N] detached; the ratio that was clipped: the token's, or its sequence's (GSPO)."""
    clipped: Tensor
    """[N] bool; the token has no gradient (PPO, GSPO) or a clipped weight (CISPO)."""


def ppo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerms:
    """Compute PPO's clipped surrogate with token ratios r = exp(logprobs - old_logprobs) (Schulman et al. 2017, arXiv:1707.06347).

    Args:
        logprobs: [N] with gradient.
        old_logprobs: [N] of the policy in the ratio's denominator.
        advantages: [N]
    """
    return clipped_surrogate(exp_ratio(logprobs - old_logprobs), advantages, clip)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerms:
    """Compute max(-r A, -clip(r, 1 - low, 1 + high) A).

    With `clip.dual`, where A < 0, at most -dual A (Ye et al. 2020, arXiv:1912.09729).

    Args:
        ratio: [N] with gradient.
        advantages: [N]
    """
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss = unclipped.maximum(bounded)
    clipped = bounded > unclipped
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
        above = (advantages < 0) & (loss > ceiling)
        loss = ceiling.where(above, loss)
        clipped = clipped | above
    return PolicyTerms(loss=loss, ratio=ratio.detach(), clipped=clipped)
