"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.mixture import mixture_architecture
from fuligo.models.parts import grouped_attention_parts, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    """Grouped attention with a bias and, in the large models, norms on queries and keys; the first layers are dense."""
    heads = read_grouped_attention(config)
    parts = grouped_attention_parts(
        heads,
        config.count("hidden_size"),
        qkv_bias=config.switch("attention_bias", default=False),
        qk_norm=config.switch("use_qk_norm", default=False),
    )
    return mixture_architecture(config, heads, parts, config.index("first_k_dense_replace", default=1))
