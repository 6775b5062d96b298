"""GLM-4.5, GLM-4.6 and GLM-4.7, mixture of experts (arXiv 2508.06471): grouped attention; the large models normalize queries and keys."""

from dataclasses import replace

from fuligo.models.architecture import Architecture, Numerics
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import grouped_attention, moe_table, with_mtp_layers
from fuligo.models.names import NameTable
from fuligo.models.parts import moe_architecture, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    bias, qk_norm = config.switch("attention_bias", default=False), config.switch("use_qk_norm", default=False)
    heads = read_grouped_attention(config, qkv_bias=bias, qk_norm=qk_norm)
    sparse = moe_architecture(config, heads, config.index("first_k_dense_replace", default=1))
    return replace(sparse, numerics=Numerics(rotary_share=0.5))


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    return with_mtp_layers(moe_table(architecture, grouped_attention(architecture), has_expert_bias=True), architecture)


FAMILY = Family(
    architecture=architecture,
    names=names,
    model_args=ModelArgs(identified_by={"num_experts": True, "moe_router_score_function": "sigmoid"}, precedence=5, needs_experts=True),
)
