"""Megatron's arguments that the trainer accepts. Does not import Megatron, because arguments are checked before a run starts."""

from collections.abc import Iterator, Mapping

from fuligo.config.placement import MegatronArguments

_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels",
    "vocab_size", "max_position_embeddings", "normalization", "norm_epsilon", "qk_layernorm", "swiglu", "disable_bias_linear",
    "add_qkv_bias", "post_self_attn_layernorm", "post_mlp_layernorm", "untie_embeddings_and_output_weights", "rotary_base",
    "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "no_rope_fusion", "use_rope_scaling",
    "rope_scaling_factor", "apply_layernorm_1p", "softmax_scale", "window_size", "window_attn_skip_freq",
)  # fmt: skip
LATENT_ATTENTION = (
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
    "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk",
)  # fmt: skip
"""Latent attention and its sparse variant; fields of `MLATransformerConfig`."""
EXPERTS = (
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "moe_router_topk",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", "moe_router_dtype", "moe_router_fusion",
    "moe_router_force_load_balancing", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_permute_fusion", "moe_deepep_num_sms",
)  # fmt: skip
"""Experts and routers; fields of `TransformerConfig`."""
_OPTIMIZER = (
    "overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size", "pad_buckets_for_high_nccl_busbw", "grad_reduce_in_bf16",
    "optimizer_offload_fraction", "no_pin_cpu_grads", "no_pin_cpu_params", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype",
    "exp_avg_sq_dtype", "store_param_remainders", "no_gradient_accumulation_fusion",
)  # fmt: skip
_FP8 = ("fp8_format", "fp8_recipe")
_STAGES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
READ = frozenset((*_MODEL, *LATENT_ATTENTION, "num_experts", *EXPERTS, *_OPTIMIZER, *_FP8, *_STAGES))
"""Arguments that the trainer reads. `not_taken` accepts any value; other checks refuse unsupported values."""

DECIDED: Mapping[str, object] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "transformer_impl": "transformer_engine",
    "moe_grouped_gemm": True,
    "moe_flex_dispatcher_backend": "deepep",
    "no_bias_dropout_fusion": True,
    "no_masked_softmax_fusion": True,
    "no_persist_layer_norm": True,
    "bf16": True,
    "ckpt_format": "torch_dist",
}
"""Arguments accepted only with the value that the trainer uses anyway."""

_CHECKED = frozenset({"spec", "experimental_attention_variant"})
"""Compared with config.json (`models.megatron_flags`), otherwise without effect."""


def not_taken(given: MegatronArguments) -> Iterator[tuple[str, object, object]]:
    """Yield the arguments that would have no effect, as (name, given value, value that the trainer uses or None).

    Arguments that the trainer neither reads nor fixes are accepted with Megatron's default value.
    """
    for name, value in given.items():
        if name in READ or name in _CHECKED:
            continue
        if name in DECIDED:
            if value != DECIDED[name]:
                yield name, value, DECIDED[name]
        elif value != given.schema().flags[name].default:
            yield name, value, None
