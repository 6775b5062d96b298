"""Names of the weights."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import dense_table, gated_mlp, grouped_attention, layer_norms, norm
from fuligo.models.names import NameTable


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """The outputs of attention and MLP are normed too; gate and up projection are one tensor."""
    return dense_table(
        architecture,
        grouped_attention(architecture, qkv_bias=config.switch("attention_bias", default=True)),
        norms=(
            *layer_norms(architecture),
            norm(architecture, "post_self_attn_layernorm"),
            norm(architecture, "post_mlp_layernorm"),
        ),
        mlp=gated_mlp(architecture, "mlp", architecture.intermediate_size, is_fused=True),
    )
