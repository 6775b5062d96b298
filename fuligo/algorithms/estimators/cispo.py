"""Clipped importance-sampling policy optimization (CISPO): MiniMax-M1 2025, arXiv:2506.13585.

Advantages: GRPO's.
Loss: -sg[clip(r, 1 - low, 1 + high)] A logprobs with r = exp(logprobs - old_logprobs). This is REINFORCE with a clipped weight, so every
token keeps its gradient. The paper sets no lower bound, which is low = 1. `Clip.dual` is not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimators.grpo import Grpo
from fuligo.algorithms.policy_loss import Clip, PolicyTerms, Segments, exp_ratio

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(Grpo):
    """GRPO with clipped importance weights on the log-likelihood."""

    has_dual_clip = False

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip, segments: Segments) -> PolicyTerms:
        ratio = exp_ratio(logprobs.detach() - old_logprobs)
        weight = ratio.clamp(1 - clip.low, 1 + clip.high)
        return PolicyTerms(loss=-weight * advantages * logprobs, ratio=ratio, clipped=weight != ratio)


ESTIMATOR = Cispo()
