"""Probability ratios and PPO's clipped surrogate, per token. Axes: N response tokens of a packed micro-batch, S samples.

Does not import torch. Advantages carry no gradient. The weights that average the loss over tokens come from `assign.token_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Limit of the magnitude of log-ratios, in nats: exp(20) = 5e8 is far beyond any clip bound, and finite, so that 0 times it is 0."""


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) with log_ratio clamped to +-LOG_RATIO_LIMIT, so that it is finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(slots=True, frozen=True)
class Segments:
    """Sample boundaries in a packed micro-batch."""

    loss_mask: Tensor
    """[N] 1 on tokens to train, else 0."""
    sample_ids: Tensor
    """[N] int64 index of each token's sample, 0 to num_samples - 1. A sample's tokens are all in one micro-batch."""
    num_samples: int
    """Number of samples S."""

    def mean(self, values: Tensor) -> Tensor:
        """Average over each sample's unmasked tokens and broadcast to all its tokens: [N] -> [N]; 0 if all its tokens are masked.

        For log-ratios this is the logarithm of the geometric mean of the sample's token ratios.
        """
        mask = self.loss_mask.to(values.dtype)
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample_ids, values * mask)
        counts = values.new_zeros(self.num_samples).index_add(0, self.sample_ids, mask)
        return (sums / counts.clamp(min=1))[self.sample_ids]


@dataclass(slots=True, frozen=True)
class Clip:
    """Bounds of the probability ratio."""

    low: float = 0.2
    """Lower bound of the ratio: 1 - low."""
    high: float = 0.2
    """Upper bound of the ratio: 1 + high; larger than `low` is DAPO's clip-higher."""
    dual: float | None = None
    """Dual clip, > 1: the loss is at most dual * |advantage| where the advantage is negative; None: unbounded."""


@dataclass(slots=True)
class PolicyTerms:
    """Policy loss of every token."""

    loss: Tensor
    """[N] loss of each token, with gradient."""
    ratio: Tensor
    """[N] ratio before clipping, detached: the token's, or its sequence's (GSPO)."""
    clipped: Tensor
    """[N] bool; True where the token has no gradient (PPO, GSPO) or a clipped weight (CISPO)."""


def ppo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerms:
    """Compute PPO's clipped surrogate with token ratios r = exp(logprobs - old_logprobs) (Schulman et al. 2017, arXiv:1707.06347).

    Tensors are [N]; `logprobs` has a gradient.
    """
    return clipped_surrogate(exp_ratio(logprobs - old_logprobs), advantages, clip)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerms:
    """Compute max(-r A, -clip(r, 1 - low, 1 + high) A).

    With `clip.dual`, the loss is at most -dual A where A < 0 (Ye et al. 2020, arXiv:1912.09729). Tensors are [N]; `ratio` has a gradient.
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
