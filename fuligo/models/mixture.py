"""The architecture of families after DeepSeek-V3: some dense layers, then layers with routed and shared experts. Pure Python."""

from __future__ import annotations

from fuligo.models.architecture import Architecture, GroupedAttention, LatentAttention
from fuligo.models.config_json import ConfigJson
from fuligo.models.parts import Parts, assemble, dense_layer, dense_mlp_parts, moe_layer, prediction_layer, read_experts


def read_num_dense_layers(config: ConfigJson, default: int) -> int:
    """Dense layers at the start: `mlp_layer_types`, else `first_k_dense_replace`.

    Raises:
        ConfigError: the two contradict each other, or a dense layer follows a sparse one.
    """
    types = config.per_layer("mlp_layer_types", ("dense", "sparse"))
    given = config.index("first_k_dense_replace", default)
    if types is None:
        return given
    num_dense = types.count("dense")
    if "dense" in types[num_dense:]:
        raise config.contradiction("mlp_layer_types has a dense layer after a sparse one; only leading dense layers are supported")
    if config.values.get("first_k_dense_replace") is not None and given != num_dense:
        raise config.contradiction(f"first_k_dense_replace is {given}, mlp_layer_types has {num_dense} dense layers")
    return num_dense


def mixture_architecture(
    config: ConfigJson, heads: GroupedAttention | LatentAttention, attention: Parts, num_dense_layers: int
) -> Architecture:
    """What such a family consists of, all layers with the same attention; prediction layers have experts.

    Raises:
        ConfigError: a key of config.json is missing, malformed, or contradicts another.
    """
    hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    if config.count("moe_layer_freq", default=1) != 1:
        raise config.contradiction(
            f"moe_layer_freq is {config.values['moe_layer_freq']}; only 1 is supported (transformers ignores others)"
        )
    if num_dense_layers > num_layers:
        raise config.contradiction(f"first_k_dense_replace {num_dense_layers} exceeds num_hidden_layers {num_layers}")
    experts = read_experts(config)
    mlp = dense_mlp_parts(hidden_size, config.count("intermediate_size"))
    num_all = num_layers + config.index("num_nextn_predict_layers", default=0)
    dense = [dense_layer(number, attention, hidden_size, mlp) for number in range(num_dense_layers)]
    sparse = [moe_layer(number, attention, hidden_size, experts, correction_bias=True) for number in range(num_dense_layers, num_all)]
    layers = dense + sparse
    mtp_layers = [prediction_layer(layer, hidden_size) for layer in layers[num_layers:]]
    return assemble(config, heads, layers[:num_layers], mtp_layers, experts)
