"""Names of the weights."""

from __future__ import annotations

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import dense_table, grouped_attention, norm, prediction_projection
from fuligo.models.names import Form, NameTable


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """Qwen2's; prediction layers are counted on their own, and join the hidden state before the embedding."""
    mtp = (
        norm(architecture, "enorm", "token_layernorm"),
        norm(architecture, "hnorm", "hidden_layernorm"),
        prediction_projection(architecture, "input_proj", Form.SWAPPED_HALVES),
        norm(architecture, "final_layernorm"),
    )
    table = dense_table(architecture, grouped_attention(architecture, qkv_bias=True))
    return replace(table, mtp=mtp, mtp_prefix="model.mtp_layers.{mtp}.")
