"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.dense import dense_architecture


def architecture(config: ConfigJson) -> Architecture:
    """Biases only where config.json asks for them."""
    bias = config.switch("attention_bias", default=False)
    mlp_bias = config.switch("mlp_bias", default=False)
    return dense_architecture(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, may_omit_kv_heads=True)
