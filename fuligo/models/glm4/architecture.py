"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.dense import dense_architecture


def architecture(config: ConfigJson) -> Architecture:
    """Four norms a layer: before and after attention, before and after the MLP. Half of each head is rotated, in interleaved pairs."""
    bias = config.switch("attention_bias", default=True)
    return dense_architecture(config, qkv_bias=bias, num_norms=4, default_head_dim=128)
