"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.dense import dense_architecture


def architecture(config: ConfigJson) -> Architecture:
    """Queries, keys and values always have a bias; config.json does not say so."""
    return dense_architecture(config, qkv_bias=True)
