"""Derivation of MODEL_ARGS from a config.json, and comparison of given MODEL_ARGS with it. Imports neither numpy nor torch."""

from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from fuligo.config import Config
from fuligo.config.flag import option_name
from fuligo.config.placement import MegatronArguments
from fuligo.errors import ConfigError
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.from_flags import EXPERT_KEYS, GROUPED_ATTENTION_KEYS, LATENT_ATTENTION_KEYS, SHAPE_KEYS, spec_family
from fuligo.models.registry import architecture_of
from fuligo.models.stated_flags import Flags, stated_flags

_IF_NOT_STATED: Mapping[str, object] = {
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 1.0,
    "rope_type": "rope",
}
"""Value that a flag must have, if given, where config.json does not state it; other switches must be off, other flags not given."""

_NOT_COMPARED = {"max_position_embeddings", "position_embedding_type"}
"""Stated flags whose value does not change the model."""

_UNREAD: Mapping[str, frozenset[str]] = {
    "multi_latent_attention": frozenset(
        {"add_qkv_bias", "group_query_attention", "num_query_groups", "rotary_percent", "rotary_interleaved"}
    ),
    "moe_router_enable_expert_bias": frozenset({"moe_router_pre_softmax"}),
}
"""Flag -> flags that Megatron ignores with it; published MODEL_ARGS have some of them."""

_SWITCHES = {
    "add_qkv_bias", "apply_layernorm_1p", "disable_bias_linear", "group_query_attention", "moe_router_enable_expert_bias",
    "moe_router_pre_softmax", "multi_latent_attention", "post_mlp_layernorm", "post_self_attn_layernorm", "qk_layernorm",
    "rotary_interleaved", "squared_relu", "swiglu", "untie_embeddings_and_output_weights", "use_rope_scaling",
}  # fmt: skip
_VALUES = {
    *SHAPE_KEYS, *GROUPED_ATTENTION_KEYS, *LATENT_ATTENTION_KEYS, *EXPERT_KEYS, *_IF_NOT_STATED, "experimental_attention_variant",
    "moe_layer_freq", "moe_router_score_function", "moe_shared_expert_intermediate_size", "norm_epsilon", "normalization", "rotary_base",
    "rotary_seq_len_interpolation_factor", "softmax_scale", "window_attn_skip_freq", "window_size",
}  # fmt: skip
_COMPARED = _SWITCHES | _VALUES
"""Flags that describe the model, whether or not its config.json states them."""


def megatron_flags(config_json: Mapping[str, Any]) -> Flags:
    """Return the MODEL_ARGS of a model: those that its config.json implies, and the recommended ones for running it."""
    return {**stated_flags(config_json), **_run_flags(architecture_of(config_json))}


def disagreements(config: Config, config_json: Mapping[str, Any], source: str = "config.json") -> Iterator[tuple[str, object, object]]:
    """Yield the MODEL_ARGS that contradict config.json: (option, given value, expected value; None if it must not be given).

    Raises ConfigError if Megatron-Core's flags cannot describe the model.
    """
    if not config.megatron:
        return
    try:
        stated = MegatronArguments(stated_flags(config_json, source))
    except ValueError as error:
        raise ConfigError(f"cannot express {source} as Megatron flags: {error}") from None
    model = ConfigJson.of(config_json, source)
    num_layers = model.count("num_hidden_layers")
    unread = {name for reason, names in _UNREAD.items() if reason in stated for name in names}
    for name, given in config.megatron.items():
        if name == "spec" and spec_family(given) != model.model_type:
            yield option_name(name), " ".join(given), None
        if name in unread or name in _NOT_COMPARED:
            continue
        if name in stated or name in _COMPARED:
            otherwise = False if name in _SWITCHES else _IF_NOT_STATED.get(name)
            expected = stated.get(name) if name in stated else otherwise
            is_frequency = isinstance(expected, list) and isinstance(given, int)
            if not _equal(_layers_of(name, given, num_layers) if is_frequency else given, expected):
                yield option_name(name), given, expected


def describe_disagreement(option: str, given: object, expected: object, source: str) -> str:
    """Return the sentence about one item of `disagreements`: "--rotary-base 5.0 contradicts config.json: the model has 10000.0"."""
    if option == "--spec":
        reason = "it is for models of another family"
    elif expected is None:
        reason = "the model has no such setting"
    else:
        reason = "the model does not use it" if expected is False else f"the model has {expected}"
    return f"{option if given is True else f'{option} {given}'} contradicts {source}: {reason}"


def _layers_of(name: str, frequency: int, num_layers: int) -> list[int]:
    """Return the per-layer pattern that Megatron derives from an integer frequency n.

    `moe_layer_freq`: the first and then every n-th layer has experts. `window_attn_skip_freq`: every n-th layer has no window.
    """
    if name == "window_attn_skip_freq":
        return [int((number + 1) % frequency != 0) for number in range(num_layers)]
    return [int(number % frequency == 0) for number in range(num_layers)]


def _equal(given: object, expected: object) -> bool:
    """Return whether two values are equal, numbers to seven digits."""
    if isinstance(given, bool) or isinstance(expected, bool) or not isinstance(given, int | float) or not isinstance(expected, int | float):
        return given == expected
    return isclose(given, expected, rel_tol=1e-7)


def _run_flags(architecture: Architecture) -> Flags:
    """Return the flags recommended for running a model.

    MoE: fast kernels, and a float32 router without load balancing. Sparse attention: keys and values all-gathered for context parallelism.
    """
    flags: Flags = {}
    if architecture.experts is not None:
        flags |= {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_dtype": "fp32"}
        flags |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0}
    if any(layer.num_buffer_elements for layer in architecture.layers):
        flags |= {"moe_router_bias_update_rate": 0}
    if architecture.sparse_index is not None:
        flags |= {"allgather_cp": True}
    return flags
