"""Names of the weights."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import latent_attention, moe_table, with_prediction_layers
from fuligo.models.names import NameTable


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """DeepSeek-V3's."""
    return with_prediction_layers(moe_table(architecture, latent_attention(architecture), has_expert_bias=True), architecture)
