"""The architecture of families whose layers are all alike: grouped attention and a dense MLP. Pure Python."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.parts import assemble, dense_layer, dense_mlp_parts, grouped_attention_parts, prediction_layer, read_grouped_attention


def dense_architecture(
    config: ConfigJson,
    *,
    qkv_bias: bool,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    num_norms: int = 2,
    default_head_dim: int | None = None,
    may_omit_kv_heads: bool = False,
    num_mtp_layers: int = 0,
) -> Architecture:
    """What a dense family consists of.

    Args:
        num_norms: of one layer; four where the outputs of attention and MLP are normed too.
        default_head_dim: where config.json has no head_dim; None: hidden_size / num_attention_heads.
        may_omit_kv_heads: without num_key_value_heads there are as many as heads.

    Raises:
        ConfigError: a key of config.json is missing, malformed, or contradicts another.
    """
    hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    heads = read_grouped_attention(config, default_head_dim=default_head_dim, may_omit_kv_heads=may_omit_kv_heads)
    attention = grouped_attention_parts(heads, hidden_size, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=qk_norm)
    mlp = dense_mlp_parts(hidden_size, config.count("intermediate_size"), bias=mlp_bias)
    layers = [dense_layer(number, attention, hidden_size, mlp, num_norms) for number in range(num_layers + num_mtp_layers)]
    mtp_layers = [prediction_layer(layer, hidden_size) for layer in layers[num_layers:]]
    return assemble(config, heads, layers[:num_layers], mtp_layers)
