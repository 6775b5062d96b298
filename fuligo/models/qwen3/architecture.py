"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.dense import dense_architecture


def architecture(config: ConfigJson) -> Architecture:
    """Norms on the heads of queries and keys; the head dimension need not be hidden_size / heads."""
    bias = config.switch("attention_bias", default=False)
    return dense_architecture(config, qkv_bias=bias, output_bias=bias, qk_norm=True, default_head_dim=128)
