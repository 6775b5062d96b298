"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.mixture import mixture_architecture
from fuligo.models.parts import latent_attention_parts, read_latent_attention


def architecture(config: ConfigJson) -> Architecture:
    """Latent attention; the first layers are dense."""
    heads = read_latent_attention(config)
    parts = latent_attention_parts(heads, config.count("hidden_size"), bias=config.switch("attention_bias", default=False))
    return mixture_architecture(config, heads, parts, config.index("first_k_dense_replace", default=3))
