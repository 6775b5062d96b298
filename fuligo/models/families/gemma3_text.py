"""Gemma 3 (arXiv 2503.19786), language model only: norms before and after each block, sliding windows in five of six layers, tied
embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace

from fuligo.models.architecture import Activation, Architecture, Numerics
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family
from fuligo.models.name_parts import dense_table, grouped_attention, norm
from fuligo.models.names import NameTable
from fuligo.models.parts import dense_architecture, read_grouped_attention

# Defaults of keys that config.json may lack.
HEAD_DIM = 256
QUERY_SCALAR = 256
WINDOW = 4096
WINDOW_PATTERN = 6
"""Default of `sliding_window_pattern`: every sixth layer attends to all tokens, the others to a window of `WINDOW` tokens."""
ROTARY_BASE, WINDOW_ROTARY_BASE = 1e6, 1e4
FULL, SLIDING = "full_attention", "sliding_attention"


def architecture(config: ConfigJson) -> Architecture:
    """Return the shapes; without `layer_types` every `sliding_window_pattern`-th layer has no window."""
    if config.switch("use_bidirectional_attention", default=False):
        raise config.contradiction("use_bidirectional_attention is true; only causal models are supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.values.get(key) is not None:
            raise config.contradiction(f"{key} is {config.values[key]!r:.80}; only null is supported, as in all published models")
    if (activation := config.text("hidden_activation", default=Activation.GELU_TANH)) != Activation.GELU_TANH:
        raise config.contradiction(f"hidden_activation is {activation}; only {Activation.GELU_TANH} is supported")
    bias = config.switch("attention_bias", default=False)
    heads = read_grouped_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=True, default_head_dim=HEAD_DIM)
    dense = dense_architecture(config, heads, num_norms=4, ties_by_default=True)
    pattern, window = config.count("sliding_window_pattern", default=WINDOW_PATTERN), config.count("sliding_window", default=WINDOW)
    by_pattern = [SLIDING if (layer.number + 1) % pattern else FULL for layer in dense.layers]
    kinds = config.per_layer("layer_types", (FULL, SLIDING)) or by_pattern
    layers = [replace(layer, window=window if kind == SLIDING else None) for layer, kind in zip(dense.layers, kinds, strict=True)]
    return replace(
        dense,
        layers=tuple(layers),
        numerics=Numerics(
            activation=Activation.GELU_TANH,
            norms_outputs=True,
            norms_around_zero=True,
            scales_in_float32=True,
            embedding_scale=config.count("hidden_size") ** 0.5,
            softmax_scale=config.count("query_pre_attn_scalar", default=QUERY_SCALAR) ** -0.5,
            rotary_base=ROTARY_BASE,
            window_rotary_base=_window_rotary_base(config),
        ),
    )


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    norms = (
        norm(architecture, "input_layernorm"),
        norm(architecture, "post_self_attn_layernorm", "post_attention_layernorm"),
        norm(architecture, "pre_mlp_layernorm", "pre_feedforward_layernorm"),
        norm(architecture, "post_mlp_layernorm", "post_feedforward_layernorm"),
    )
    return dense_table(architecture, grouped_attention(architecture), norms=norms)


def _window_rotary_base(config: ConfigJson) -> float:
    """Return the rotary base of layers with a window. Raises ConfigError if they scale positions."""
    by_type = config.values.get("rope_parameters")
    given = by_type.get(SLIDING) if isinstance(by_type, Mapping) else None
    if not isinstance(given, Mapping):
        return config.number("rope_local_base_freq", default=WINDOW_ROTARY_BASE)
    if (kind := given.get("rope_type") or "default") != "default":
        raise config.contradiction(f"rope_parameters of {SLIDING} have rope_type {kind!r:.80}; only default is supported")
    return ConfigJson(given, f"{config.source}, rope_parameters of {SLIDING}").number("rope_theta", default=WINDOW_ROTARY_BASE)


FAMILY = Family(architecture=architecture, names=names)
