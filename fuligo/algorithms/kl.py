"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3", "low_var_kl"]

LOW_VAR_KL_LIMIT = 10.0
"""Nats: `low_var_kl` is k3 clamped to +- this, so that one token cannot dominate the loss."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KlType) -> Tensor:
    """Estimate the KL of every token, in nats.

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, low_var_kl = clamp(k3, -10, 10).
    k1 and k3 are unbiased as values. As a loss k1's expected on-policy gradient is zero, k2's is the gradient of the KL.

    Args:
        logprobs: [N] with gradient.
        ref_logprobs: [N]

    Returns:
        [N]
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.exp(-d) - 1 + d
    # Where |d| > 20 the clamp below applies anyway; without this one exp overflows and its gradient is 0 * inf.
    d = d.clamp(-20.0, 20.0)
    return (torch.exp(-d) - 1 + d).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


def unbiased_kl(kl: Tensor, ratio: Tensor) -> Tensor:
    """Multiply the estimate by pi / pi_old, both with gradient, which makes value and gradient unbiased for tokens sampled from pi_old.

    DeepSeek-V3.2 (arXiv:2512.02556), section 3.1.

    Args:
        kl: [N]
        ratio: [N] pi / pi_old of each token.
    """
    return kl * ratio
