"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

import torch
from torch import Tensor

from fuligo.algorithms.settings import KlType

LOW_VAR_KL_LIMIT = 10.0
"""Nats: `low_var_kl` is clamped to +- this, so that one token cannot dominate the loss."""
_LOWEST = -80.0
"""Nats: exp(80) is finite in float32, and times any ratio far above the limit; a larger argument would give the gradient 0 * inf."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KlType, ratio: Tensor | None = None) -> Tensor:
    """Estimate the KL of every token, in nats: [N] each, `logprobs` and `ratio` with gradient -> [N].

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, low_var_kl = clamp(k3, -10, 10).
    k1 and k3 are unbiased as values. As a loss k1's expected on-policy gradient is zero, k2's is the gradient of the KL.

    Args:
        ratio: pi / pi_old, by which the estimate is multiplied before low_var_kl's clamp. For tokens from pi_old this makes k1 and k3
            unbiased, with their gradients (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = d.square() / 2
    else:
        d = d.clamp(min=_LOWEST) if kind == "low_var_kl" else d
        kl = torch.exp(-d) - 1 + d
    if ratio is not None:
        kl = ratio * kl
    return kl.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else kl
