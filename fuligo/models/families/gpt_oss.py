"""gpt-oss (arXiv 2508.10925): sliding windows in every other layer, attention sinks, experts with biases and a clamped SwiGLU.

Published files hold the experts in MXFP4, four bits a weight; a trainer dequantizes them to bfloat16.
"""

from dataclasses import replace

from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.architecture import Architecture, Layer, PartKind, Split
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family
from fuligo.models.parts import (
    assemble,
    expert_mlp_parts,
    grouped_attention_parts,
    norms,
    read_experts,
    read_grouped_attention,
    vector,
)

HEAD_DIM = 64
WINDOW = 128
CLAMP = 7.0
"""Limit of gate and up projection before the activation (`swiglu_limit`), which transformers 5.12.1 does not read from config.json."""
FULL, SLIDING = "full_attention", "sliding_attention"


def architecture(config: ConfigJson) -> Architecture:
    """Return the shapes; without `layer_types` every other layer has a window, beginning with the first."""
    hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    if (clamp := config.number("swiglu_limit", default=CLAMP)) != CLAMP:
        raise config.contradiction(f"swiglu_limit is {clamp:g}; only {CLAMP:g} is supported, which transformers always uses")
    bias = config.switch("attention_bias", default=True)
    heads = read_grouped_attention(config, qkv_bias=bias, output_bias=bias, default_head_dim=HEAD_DIM)
    heads = replace(heads, has_sinks=True)
    sinks = vector(PartKind.ATTENTION, heads.num_heads, Split.TENSOR)
    attention = (*grouped_attention_parts(heads, hidden_size), sinks)
    experts = read_experts(config, num_experts_key="num_local_experts", size_key="intermediate_size", shared=False)
    experts = replace(experts, has_softmax_router=True)
    biases = (
        vector(PartKind.ROUTER, experts.num_experts),
        vector(PartKind.ROUTED_EXPERTS, experts.num_experts * (2 * experts.intermediate_size + hidden_size), Split.EXPERT),
    )
    parts = (*attention, *expert_mlp_parts(experts, hidden_size), *biases, norms(2 * hidden_size))
    kinds = config.per_layer("layer_types", (FULL, SLIDING)) or [(SLIDING, FULL)[number % 2] for number in range(num_layers)]
    window = config.count("sliding_window", default=WINDOW)
    layers = [Layer(number, parts, is_moe=True, window=window if kind == SLIDING else None) for number, kind in enumerate(kinds)]
    given = config.values.get("quantization_config")
    is_mxfp4 = isinstance(given, dict) and given.get("quant_method") == "mxfp4"
    assembled = assemble(config, heads, layers, experts=experts)
    return replace(assembled, is_mxfp4=True, is_quantized=False) if is_mxfp4 else assembled


FAMILY = Family(
    architecture=architecture,
    why_not_megatron="the Megatron trainer supports neither attention sinks nor experts with biases and clamped activations",
    stored_experts=StoredExperts.WHOLE,
    has_plain_experts=False,
    has_window_pool=True,
    writes_harmony=True,
)
