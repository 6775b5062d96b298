"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

import torch
from torch import Tensor

from fuligo.algorithms.settings import KlType

LOW_VAR_KL_LIMIT = 10.0
"""Limit of the magnitude of `low_var_kl`, in nats, so that one token cannot dominate the loss."""
_LOWEST = -80.0
"""Lower bound of d for low_var_kl, in nats: exp(80) times the smallest ratio is still far above the clamp, and exp(80) is finite in
float32, where an infinite estimate would give the gradient 0 * inf = NaN."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KlType, ratio: Tensor | None = None) -> Tensor:
    """Estimate the KL of every token, in nats. Tensors are [N]; `logprobs` and `ratio` have gradients.

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, low_var_kl = clamp(k3, -10, 10).
    k1 and k3 are unbiased as values. As losses, k1 has an expected on-policy gradient of zero, and k2 has the gradient of the KL.

    Args:
        ratio: pi / pi_old; multiplies the estimate, before the clamp of low_var_kl. For tokens sampled from pi_old, this makes the values
            and gradients of k1 and k3 unbiased (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
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
