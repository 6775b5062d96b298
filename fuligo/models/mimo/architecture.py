"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.dense import dense_architecture


def architecture(config: ConfigJson) -> Architecture:
    """Qwen2's layers, and prediction layers of the same kind."""
    return dense_architecture(config, qkv_bias=True, num_mtp_layers=config.index("num_nextn_predict_layers", default=0))
