"""Qwen3-Next: three Gated DeltaNet layers (arXiv 2412.06464) to one layer of gated attention; routed experts and a gated shared expert.

The MTP layer of the published files has gated attention. transformers 5.12.1 leaves it out; `models.mtp` computes it.
"""

from collections.abc import Collection
from dataclasses import replace
from math import ceil

from fuligo.models.architecture import Architecture, Experts, Layer, LinearAttention, PartKind, Split
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.parts import (
    Parts,
    assemble,
    dense_mlp_parts,
    expert_mlp_parts,
    grouped_attention_parts,
    linear_attention_parts,
    matrix,
    mtp_layer,
    norms,
    read_expert_layers,
    read_experts,
    read_grouped_attention,
)

FULL_ATTENTION_INTERVAL = 4


def architecture(config: ConfigJson) -> Architecture:
    experts = read_experts(config, num_experts_key="num_experts", shared=False)
    num_mtp_layers = config.index("num_nextn_predict_layers", default=1)  # published files have an MTP layer, but not the key
    return hybrid_architecture(config, experts, read_expert_layers(config), num_mtp_layers=num_mtp_layers, has_fused_inputs=True)


def hybrid_architecture(
    config: ConfigJson,
    experts: Experts | None,
    expert_layers: Collection[int],
    *,
    num_mtp_layers: int,
    has_fused_inputs: bool = False,
) -> Architecture:
    """Return the architecture of a family that has both Gated DeltaNet and full-attention layers.

    Args:
        experts: sizes of the experts; None: no layer has any.
        expert_layers: indices of the layers with experts; MTP layers have experts unless `experts` is None.
        has_fused_inputs: as in `LinearAttention`.
    """
    hidden_size, linear = config.count("hidden_size"), _read_linear(config, has_fused_inputs)
    heads = replace(read_grouped_attention(config, qk_norm=True, default_head_dim=256), has_output_gate=True)
    full = grouped_attention_parts(heads, hidden_size)
    if config.switch("attention_bias", default=False):
        raise config.contradiction("attention_bias is true; only published models, which have no biases, are supported")
    mixing = {"full_attention": full, "linear_attention": linear_attention_parts(linear, hidden_size)}

    mixture: Parts = ()
    if experts is not None:
        shared_size = config.count("shared_expert_intermediate_size")
        mixture = (
            *expert_mlp_parts(experts, hidden_size),
            matrix(PartKind.SHARED_EXPERT, 3 * hidden_size * shared_size, Split.TENSOR),
            matrix(PartKind.SHARED_EXPERT, hidden_size, Split.REPLICATED, quantizable=False),  # the gate
        )
        num_shared = ceil(shared_size / experts.intermediate_size)
        experts = replace(experts, num_shared_experts=num_shared, has_shared_gate=True, has_softmax_router=True)

    def layer(number: int, kind: str, *, is_moe: bool) -> Layer:
        mlp = mixture if is_moe else dense_mlp_parts(hidden_size, config.count("intermediate_size"))
        return Layer(number, (*mixing[kind], *mlp, norms(2 * hidden_size)), is_moe=is_moe)

    layers = [layer(number, kind, is_moe=number in expert_layers) for number, kind in enumerate(_kinds(config))]
    further = range(len(layers), len(layers) + num_mtp_layers)
    mtp_layers = [mtp_layer(layer(number, "full_attention", is_moe=experts is not None), hidden_size) for number in further]
    return assemble(config, heads, layers, mtp_layers, experts=experts, linear_attention=linear)


def _read_linear(config: ConfigJson, has_fused_inputs: bool) -> LinearAttention:
    linear = LinearAttention(
        num_key_heads=config.count("linear_num_key_heads"),
        num_value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        conv_width=config.count("linear_conv_kernel_dim", default=4),
        has_fused_inputs=has_fused_inputs,
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise config.contradiction(
            f"linear_num_key_heads {linear.num_key_heads} does not divide linear_num_value_heads {linear.num_value_heads}"
        )
    return linear


def _kinds(config: ConfigJson) -> tuple[str, ...]:
    """Return the kind of each layer: `layer_types`, else every `full_attention_interval`-th is full attention."""
    if (given := config.per_layer("layer_types", ("linear_attention", "full_attention"))) is not None:
        return given
    interval = config.count("full_attention_interval", default=FULL_ATTENTION_INTERVAL)
    numbers = range(1, config.count("num_hidden_layers") + 1)
    return tuple("linear_attention" if number % interval else "full_attention" for number in numbers)


FAMILY = Family(
    architecture=architecture,
    why_not_megatron="the gated delta net of Megatron-Core 0.16.1 refuses packed sequences",
    unwritten_keys=("full_attention_interval",),
    has_gated_delta=True,
    model_args=ModelArgs(specs=("slime_plugins.models.qwen3_next.get_qwen3_next_spec",)),
    has_mtp_module=True,
)
