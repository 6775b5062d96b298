"""Group sequence policy optimization (GSPO): Zheng et al. 2025, arXiv:2507.18071.

Advantages: GRPO's.
Loss: PPO's surrogate with the sequence ratio s = exp(mean over the sample's unmasked tokens of logprobs - old_logprobs) at every token. The
gradient is that of the paper's GSPO-token, s_t = sg[s] pi_t / sg[pi_t]: -s A with respect to each token's log-probability. It equals
GSPO's gradient if all tokens of a sample share one advantage, and is also defined if advantages or weights differ between tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimators.grpo import Grpo
from fuligo.algorithms.policy_loss import Clip, PolicyTerms, Segments, clipped_surrogate, exp_ratio

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Grpo):
    """GRPO with one probability ratio per sequence."""

    ratio_level = "sequence"

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip, segments: Segments) -> PolicyTerms:
        sequence_ratio = exp_ratio(segments.mean((logprobs - old_logprobs).detach()))
        return clipped_surrogate(sequence_ratio * (logprobs - logprobs.detach()).exp(), advantages, clip)


ESTIMATOR = Gspo()
