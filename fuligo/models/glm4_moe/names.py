"""Names of the weights."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import grouped_attention, moe_table, with_prediction_layers
from fuligo.models.names import NameTable


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """Grouped attention; router, experts and prediction layers as DeepSeek-V3 has them."""
    attention = grouped_attention(
        architecture,
        qkv_bias=config.switch("attention_bias", default=False),
        qk_norm=config.switch("use_qk_norm", default=False),
    )
    return with_prediction_layers(moe_table(architecture, attention, has_expert_bias=True), architecture)
