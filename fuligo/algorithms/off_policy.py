"""Off-policy corrections: importance weights between engine and trainer, and off-policy sequence masking.

Importance weights: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
Axes: N response tokens of a packed micro-batch, S samples.
Weights and masks carry no gradient and apply only to the policy-gradient term, after clipping.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fuligo.algorithms.policy_loss import Segments, exp_ratio

CorrectionMode = Literal["truncate", "icepop", "sequence-mask"]


@dataclass(slots=True, frozen=True)
class Correction:
    """Treatment of importance weights outside [low, high]."""

    mode: CorrectionMode = "truncate"
    low: float = 0.0
    high: float = 2.0


@dataclass(slots=True)
class ImportanceWeights:
    """Importance weights after the correction, without gradient."""

    weights: Tensor
    """[N] factor of each token's policy-gradient loss."""
    cut: Tensor
    """[N] bool; True where a bound or 0 replaces the token's ratio."""


def importance_weights(old_logprobs: Tensor, engine_logprobs: Tensor, correction: Correction, segments: Segments) -> ImportanceWeights:
    """Compute the weight w = exp(old_logprobs - engine_logprobs) of every token and correct weights outside the bounds.

    truncate: clamp to the bounds (TIS). icepop: 0 for the token (IcePop, Ling team 2025). sequence-mask: 0 for all tokens of a sample
    if the geometric mean of w over its unmasked tokens is outside. Tensors are [N]; `old_logprobs` are the trainer's, before the
    rollout's first optimizer step.
    """
    log_ratio = (old_logprobs - engine_logprobs).detach()
    ratio = exp_ratio(log_ratio)
    if correction.mode == "truncate":
        weights = ratio.clamp(correction.low, correction.high)
        return ImportanceWeights(weights, cut=weights != ratio)
    judged = ratio
    if correction.mode == "sequence-mask":
        judged = exp_ratio(segments.mean(log_ratio))
    cut = (judged < correction.low) | (judged > correction.high)
    return ImportanceWeights(torch.where(cut, 0.0, ratio), cut=cut)


def opsm_mask(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, delta: float, segments: Segments) -> Tensor:
    """Return the tokens that off-policy sequence masking (OPSM) excludes from the loss, [N] bool.

    These are the tokens with a negative advantage in samples whose mean of old_logprobs - logprobs over unmasked tokens, an estimate of
    KL(old || policy), exceeds `delta` nats per token. DeepSeek-V3.2 (arXiv:2512.02556), section 3.1. Tensors are [N].
    """
    distance = segments.mean((old_logprobs - logprobs).detach())
    return (advantages < 0) & (distance > delta)
