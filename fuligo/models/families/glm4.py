"""GLM-4-0414 and GLM-Z1, dense: norms before and after attention and MLP; half of each head is rotated, in interleaved pairs.

Its layer in Megatron is in `fuligo.trainer.megatron_backend.layer_spec`.
"""

from dataclasses import replace

from fuligo.models.architecture import Architecture, Numerics
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import dense_table, gated_mlp, grouped_attention, layer_norms, norm
from fuligo.models.names import NameTable
from fuligo.models.parts import dense_architecture, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    heads = read_grouped_attention(config, qkv_bias=config.switch("attention_bias", default=True), default_head_dim=128)
    dense = dense_architecture(config, heads, num_norms=4)
    return replace(dense, numerics=Numerics(norms_outputs=True, rotary_share=0.5, rotary_interleaved=True))


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    norms = (norm(architecture, "post_self_attn_layernorm"), norm(architecture, "post_mlp_layernorm"))
    return dense_table(
        architecture,
        grouped_attention(architecture),
        norms=(*layer_norms(architecture), *norms),
        mlp=gated_mlp(architecture, "mlp", architecture.intermediate_size, is_fused=True),
    )


FAMILY = Family(
    architecture=architecture,
    names=names,
    fuses_gate_up=True,
    model_args=ModelArgs(identified_by={"post_self_attn_layernorm": True}, precedence=3, specs=("slime_plugins.models.glm4.get_glm_spec",)),
)
