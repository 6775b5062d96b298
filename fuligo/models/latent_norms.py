"""Norms of the latents in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as engines compute them."""

from __future__ import annotations

from typing import Any

from torch import nn

_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


def take_stated_epsilon(model: nn.Module) -> int:
    """Give the norms of latents the epsilon that config.json states for all norms.

    So do SGLang 0.5.15.post1 (models/deepseek_v2.py) and Megatron-Core 0.16.1 (transformer/multi_latent_attention.py). transformers 5.12.1
    has 1e-6 there whatever is stated; GLM-4.7-Flash states 1e-5.

    Returns:
        The number of modules changed.
    """
    config: Any = model.config
    norms: list[Any] = [module for name, module in model.named_modules() if name.endswith(_LATENT_NORMS)]
    changed = [norm for norm in norms if norm.variance_epsilon != config.rms_norm_eps]
    for norm in changed:
        norm.variance_epsilon = config.rms_norm_eps
    return len(changed)
