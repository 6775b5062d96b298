"""Names of the weights."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import grouped_attention, moe_table
from fuligo.models.names import NameTable


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """Qwen3's attention; the router has no bias."""
    return moe_table(architecture, grouped_attention(architecture, qk_norm=True), has_expert_bias=False)
