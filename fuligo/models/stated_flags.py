"""Flags of Megatron-Core 0.16.1 that follow from a config.json, named with underscores. Imports neither numpy nor torch."""

from collections.abc import Mapping
from typing import Any

from fuligo.config.values import layers_text
from fuligo.models.architecture import Activation, Architecture, GroupedAttention, LatentAttention, PartKind, SparseIndex
from fuligo.models.config_json import ConfigJson
from fuligo.models.registry import architecture_of, family_of

Flags = dict[str, Any]

_YARN_KEYS = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_YARN = {"rotary_scaling_factor": "factor", **{key: key for key in _YARN_KEYS}}
"""Flag -> key of the rotary settings."""

_LLAMA_3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1, "high_freq_factor": 4}
"""Constants of Megatron's `--use-rope-scaling`, besides the factor (`RotaryEmbedding._apply_scaling`)."""


def stated_flags(config_json: Mapping[str, Any], source: str = "config.json") -> Flags:
    """Return the flags that describe the model of the config.json at `source`. Raises ConfigError if Megatron-Core has none for it."""
    config, architecture = ConfigJson.of(config_json, source), architecture_of(config_json, source)
    attention, numerics = architecture.attention, architecture.numerics
    reason = family_of(architecture).why_not_megatron
    if reason is not None:
        raise config.contradiction(f"cannot state a {config.model_type} model as Megatron flags: {reason}; use --train-backend torch")
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.intermediate_size,
        "num_attention_heads": attention.num_heads,
        **(_grouped(config, architecture, attention) if isinstance(attention, GroupedAttention) else _latent(config, attention)),
        **(_sparse(architecture.sparse_index) if architecture.sparse_index else {}),
        **_rotary(config, architecture),
        **_windows(architecture),
        "max_position_embeddings": architecture.max_position_embeddings,
        "vocab_size": architecture.vocab_size,
        **({} if architecture.tied_embeddings else {"untie_embeddings_and_output_weights": True}),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", default=1e-6),
        **({"apply_layernorm_1p": True} if numerics.norms_around_zero else {}),
        **({"post_self_attn_layernorm": True, "post_mlp_layernorm": True} if numerics.norms_outputs else {}),
        # Megatron-Core has no flag for GeGLU.
        **({"swiglu": True} if numerics.activation is Activation.SILU else {}),
        **({} if numerics.softmax_scale is None else {"softmax_scale": numerics.softmax_scale}),
        "disable_bias_linear": True,
        **_experts(config, architecture),
    }


def _grouped(config: ConfigJson, architecture: Architecture, attention: GroupedAttention) -> Flags:
    has_mlp_bias = any(part.kind is PartKind.DENSE_MLP and not part.is_matmul for layer in architecture.layers for part in layer.parts)
    if attention.has_output_bias or has_mlp_bias:
        raise config.contradiction(
            f"Megatron has no flags for the biases of this {config.model_type} model (attention_bias, mlp_bias); use --train-backend torch"
        )
    return {
        "group_query_attention": True,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        **({"add_qkv_bias": True} if attention.has_qkv_bias else {}),
        **({"qk_layernorm": True} if attention.has_head_norms else {}),
    }


def _latent(config: ConfigJson, attention: LatentAttention) -> Flags:
    if config.switch("attention_bias", default=False):
        raise config.contradiction("attention_bias is true, but Megatron's latent attention has no biases; use --train-backend torch")
    return {
        "multi_latent_attention": True,
        # Megatron-Core has no flag for directly projected queries; without q_lora_rank it uses its own default.
        **({} if attention.q_lora_rank is None else {"q_lora_rank": attention.q_lora_rank}),
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_head_dim": attention.qk_nope_head_dim,
        "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "kv_channels": attention.qk_nope_head_dim,
        "qk_layernorm": True,
    }


def _sparse(index: SparseIndex) -> Flags:
    """Return the flags of sparse attention. Which layers have an indexer is only in config.json: Megatron-Core has no flag for it."""
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": index.num_heads,
        "dsa_indexer_head_dim": index.head_dim,
        "dsa_indexer_topk": index.top_k,
    }


def _windows(architecture: Architecture) -> Flags:
    """Return the flags of layers with a sliding window; all windows have the same size."""
    windows = {layer.window for layer in architecture.layers} - {None}
    if not windows:
        return {}
    (window,) = windows
    assert window is not None
    return {
        "window_size": [window - 1, 0],
        "window_attn_skip_freq": layers_text([int(layer.window is not None) for layer in architecture.layers]),
    }


def _rotary(config: ConfigJson, architecture: Architecture) -> Flags:
    is_latent, numerics = isinstance(architecture.attention, LatentAttention), architecture.numerics
    base = config.rotary_number("rope_theta") or numerics.rotary_base
    flags: Flags = {"position_embedding_type": "rope", "rotary_base": int(base) if base == int(base) else base}
    if not is_latent:
        share = config.rotary_number("partial_rotary_factor") or numerics.rotary_share
        flags |= {} if share == 1 else {"rotary_percent": share}
        flags |= {"rotary_interleaved": True} if numerics.rotary_interleaved else {}
    kind = config.rotary_kind
    if kind == "default":
        return flags | ({"rope_type": "rope"} if is_latent else {})
    if (factor := config.rotary_number("factor")) is None:
        raise config.contradiction(f"rotary scaling of type {kind} has no factor; add it")
    if kind == "yarn" and is_latent:
        scaling = {flag: config.rotary_number(key) for flag, key in _YARN.items()}
        return flags | {"rope_type": "yarn"} | {flag: value for flag, value in scaling.items() if value is not None}
    if kind == "linear" and not is_latent and factor == int(factor):
        return flags | {"rotary_seq_len_interpolation_factor": int(factor)}
    if kind == "llama3" and all(config.rotary_number(key) == value for key, value in _LLAMA_3.items()):
        return flags | {"use_rope_scaling": True, "rope_scaling_factor": factor}
    raise config.contradiction(
        f"Megatron has no flags for the rotary scaling of this {config.model_type} model ({kind}); use --train-backend torch"
    )


def _experts(config: ConfigJson, architecture: Architecture) -> Flags:
    experts = architecture.experts
    if experts is None:
        return {}
    flags: Flags = {
        "num_experts": experts.num_experts,
        "moe_layer_freq": layers_text([int(layer.is_moe) for layer in architecture.layers]),
        "moe_router_topk": experts.num_experts_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
    }
    if experts.has_softmax_router:
        # If weights are normalized over the chosen experts, softmax before or after the choice gives equal weights.
        pre_softmax = {} if config.switch("norm_topk_prob", default=False) else {"moe_router_pre_softmax": True}
        return flags | {"moe_router_score_function": "softmax"} | pre_softmax
    if not config.switch("norm_topk_prob", default=True):
        raise config.contradiction(
            "norm_topk_prob is false, but Megatron always normalizes the chosen sigmoid scores; use --train-backend torch"
        )
    num_groups = config.count("n_group", default=1)
    shared_size = experts.num_shared_experts * experts.intermediate_size
    return {
        **flags,
        **({"moe_shared_expert_intermediate_size": shared_size} if shared_size else {}),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor", default=1.0),
        **({} if num_groups == 1 else {"moe_router_num_groups": num_groups, "moe_router_group_topk": config.count("topk_group")}),
    }
