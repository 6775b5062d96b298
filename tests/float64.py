"""Gradients in float64, where two correct programs agree on any machine, and the gated delta rule as a recurrence."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuligo.models import cpu_products
from fuligo.models.gated_delta import gated_delta_modules


def float32_bound(gradients: dict[str, Tensor]) -> float:
    """Return the largest accepted error of float32 gradients, relative to the largest gradient.

    Gated DeltaNet divides queries and keys by their lengths, which are small in tiny random models. On an AMD EPYC, the largest error is
    1.4e-5 with the weights of the tests, and 6.5e-5 with others (qwen3_5_moe_text, seed 1); transformers' is as large. Among other models,
    it is largest for Gemma 4, 7e-6.
    """
    return 2e-5 if any(".linear_attn." in name for name in gradients) else 1e-5


def assert_gradients_agree(found: dict[str, Tensor], expected: dict[str, Tensor], *, bound: float) -> None:
    """Compare gradients by name; `bound` is relative to the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    off = {name: float((gradient - expected[name]).abs().max() / largest) for name, gradient in found.items()}
    assert max(off.values()) <= bound, max(off.items(), key=lambda item: item[1])


@contextmanager
def in_float64(*models: nn.Module) -> Iterator[None]:
    """Convert models to float64, and let code that names float32 compute in float64 until the context ends.

    transformers' norms, softmax and delta rule, and fuligo's logits, would cast to float32.
    """
    for model in models:
        for module in model.double().modules():
            if hasattr(getattr(module, "config", None), "_experts_implementation"):
                module.config._experts_implementation = "eager"  # torch's grouped product does not support float64
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "float32", torch.float64))
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        stack.enter_context(patch.object(cpu_products, "_product", F.linear))  # nor does oneDNN
        yield


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **_: Any
) -> tuple[Tensor, None]:
    """Compute the gated delta rule token by token, as in section 3.1 of arXiv 2412.06464.

    S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T with a_t = exp(g_t) and b_t = beta_t. Queries and keys are divided by their
    lengths, with 1e-6 added below the root as in the kernels; queries are scaled by 1 / sqrt(Dk).

    Args:
        query, key: [B, L, H, Dk]
        value: [B, L, H, Dv]
        g, beta: [B, L, H]

    Returns:
        [B, L, H, Dv] S_t q_t, and no final state.
    """
    assert use_qk_l2norm_in_kernel
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = value.new_zeros(*value.shape[:1], *value.shape[2:], key.size(-1))  # [B, H, Dv, Dk]
    outputs: list[Tensor] = []
    for q, k, v, decay, rate in zip(*(x.unbind(1) for x in (query, key, value, g.exp(), beta)), strict=True):
        kept = state - rate[..., None, None] * (state @ k[..., None]) * k[..., None, :]
        state = decay[..., None, None] * kept + (rate[..., None] * v)[..., None] * k[..., None, :]
        outputs.append((state @ q[..., None])[..., 0] / q.size(-1) ** 0.5)
    return torch.stack(outputs, dim=1), None


def use_delta_rule(model: nn.Module, rule: Callable[..., tuple[Tensor, None]] = delta_rule) -> int:
    """Make the Gated DeltaNet layers of a transformers model compute `rule`, and return the number of these layers."""
    modules = gated_delta_modules(model)
    for module in modules:
        module.chunk_gated_delta_rule = rule
    return len(modules)
