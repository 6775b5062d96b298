"""Qwen3, mixture of experts (arXiv 2505.09388): Qwen3's attention; no shared expert, no bias in the router."""

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import grouped_attention, moe_table
from fuligo.models.names import NameTable
from fuligo.models.parts import (
    assemble,
    dense_layer,
    dense_mlp_parts,
    grouped_attention_parts,
    moe_layer,
    read_expert_layers,
    read_experts,
    read_grouped_attention,
)


def architecture(config: ConfigJson) -> Architecture:
    hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    # transformers 5 writes num_local_experts, the published files have num_experts.
    key = "num_local_experts" if config.values.get("num_experts") is None and "num_local_experts" in config.values else "num_experts"
    bias = config.switch("attention_bias", default=False)
    heads = read_grouped_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
    experts = replace(read_experts(config, num_experts_key=key, shared=False), has_softmax_router=True)
    attention = grouped_attention_parts(heads, hidden_size)
    mlp = dense_mlp_parts(hidden_size, config.count("intermediate_size"))
    expert_layers = read_expert_layers(config)
    layers = [
        moe_layer(number, attention, hidden_size, experts, correction_bias=False)
        if number in expert_layers
        else dense_layer(number, attention, hidden_size, mlp)
        for number in range(num_layers)
    ]
    return assemble(config, heads, layers, experts=experts)


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    return moe_table(architecture, grouped_attention(architecture), has_expert_bias=False)


FAMILY = Family(
    architecture=architecture,
    names=names,
    batch_invariant_on=("cpu", "cuda"),
    model_args=ModelArgs(
        identified_by={"num_experts": True}, precedence=4, needs_experts=True, num_experts_key="num_experts", lists_dense_layers=True
    ),
)
