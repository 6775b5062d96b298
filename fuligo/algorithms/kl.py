"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3", "low_var_kl"]

LOW_VAR_KL_LIMIT = 10.0
"""Nats: `low_var_kl` is k3 clamped to +- this, so that one token cannot dominate the loss."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KlType) -> Tensor:
    """Estimate the KL of every token, in nats: two [N], `logprobs` with gradient -> [N].

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, low_var_kl = clamp(k3, -10, 10).
    k1 and k3 are unbiased as values. As a loss k1's expected on-policy gradient is zero, k2's is the gradient of the KL.
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
    """Multiply the estimate [N] by the ratio pi / pi_old [N], both with gradient; unbiased, with its gradient, for tokens from pi_old.

    DeepSeek-V3.2 (arXiv:2512.02556), section 3.1.
    """
    return kl * ratio
