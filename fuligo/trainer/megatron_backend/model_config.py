"""Megatron's configuration of a model, built from the trainer's settings."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from fuligo.config.values import read_layers
from fuligo.errors import ConfigError
from fuligo.models.architecture import Activation
from fuligo.trainer.megatron_backend.flags import EXPERTS, LATENT_ATTENTION
from fuligo.trainer.megatron_backend.mtp import refuse_idle_embedding
from fuligo.trainer.megatron_backend.router import refuse_unsupported_routing
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.sparse_latent_attention import refuse_unsupported_sparsity
from fuligo.trainer.parameters import DTYPES

Fields = dict[str, Any]
"""Keyword arguments of `TransformerConfig`."""


def transformer_config(settings: MegatronTrainerSettings) -> TransformerConfig:
    """Build Megatron's configuration. Raises ConfigError if Megatron or the trainer refuses the model, its layout or a flag."""
    refuse_missing_transport(settings)
    refuse_inexact_blocks(settings)
    refuse_idle_embedding(settings)
    flags = settings.model_flags
    latent = bool(flags.get("multi_latent_attention"))
    fields: Fields = {
        **_shape(flags, settings.activation),
        # q_lora_rank None means that queries are projected directly, which is not Megatron's default. `experimental_attention_variant`
        # stays off, because its layers are not used and it refuses context parallelism.
        **({**_given(flags, ("rotary_base", *LATENT_ATTENTION)), "q_lora_rank": flags.get("q_lora_rank")} if latent else {}),
        **_experts(settings),
        **_parallelism(settings),
        **_computation(settings),
    }
    try:
        config = (MLATransformerConfig if latent else TransformerConfig)(**fields)
        for pp_rank in range(settings.layout.pp):
            get_num_layers_to_build(config, vp_stage=0 if settings.layout.vpp > 1 else None, pp_rank=pp_rank)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron cannot build the model: {error}; change MODEL_ARGS or the parallel sizes") from error
    refuse_unsupported_routing(config)
    refuse_unsupported_sparsity(config, settings)
    return config


def refuse_missing_transport(settings: MegatronTrainerSettings) -> None:
    """Check that the token dispatcher can run on this machine. Raises ConfigError if it needs CUDA or DeepEP and they are missing."""
    if settings.dispatcher != "flex" and not settings.deepep:
        return
    instead = "use --moe-token-dispatcher-type alltoall" + (" without --moe-enable-deepep" if settings.deepep else "")
    if settings.device != "cuda":
        raise ConfigError(f"--moe-token-dispatcher-type flex and DeepEP run on CUDA only; {instead}")
    if find_spec("deep_ep") is None:
        raise ConfigError(
            f"cannot use --moe-token-dispatcher-type {settings.dispatcher} with DeepEP: the package deep_ep is not installed on this "
            f"machine; install it (https://github.com/deepseek-ai/DeepEP) on every trainer node, or {instead}"
        )


def refuse_inexact_blocks(settings: MegatronTrainerSettings) -> None:
    """Raise ConfigError for `--fp8-recipe blockwise` if this GPU cannot multiply FP8 values with a float32 scale per block.

    TransformerEngine 2.12 emulates this from Blackwell on with MXFP8, without an error: only the exponents of scales are used there.
    """
    if settings.uses_fp8 and settings.model_flags["fp8_recipe"] == "blockwise" and torch.cuda.get_device_capability()[0] != 9:
        raise ConfigError(
            f"--fp8-recipe blockwise: {torch.cuda.get_device_name()} cannot multiply with a float32 scale per block, which needs a Hopper "
            "GPU; use --fp8-recipe tensorwise"
        )


def padded_vocab_size(settings: MegatronTrainerSettings) -> int:
    """Return the vocabulary size rounded up to a multiple of the TP size; the additional rows are padding."""
    tp = settings.layout.tp
    return -(-settings.model_flags["vocab_size"] // tp) * tp


def gelu_tanh(values: Tensor) -> Tensor:
    """Return GELU's tanh approximation."""
    return F.gelu(values, approximate="tanh")


def _shape(flags: Mapping[str, Any], activation: Activation) -> Fields:
    """Return the fields that all model families use. Dropout is off, because log-probabilities must match the engine's.

    Raises ConfigError if the model has other norms or activations than the trainer supports.
    """
    is_gelu = activation is Activation.GELU_TANH
    if flags.get("normalization", "LayerNorm") != "RMSNorm" or not (flags.get("swiglu") or is_gelu):
        raise ConfigError(
            "cannot train this model with Megatron: the trainer supports only RMSNorm, and gated MLPs with SiLU (SwiGLU) or tanh GELU; use "
            "--normalization RMSNorm --swiglu"
        )
    return {
        **{name: flags[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")},
        **_given(flags, ("kv_channels", "softmax_scale", "add_qkv_bias", "rotary_interleaved")),
        "num_query_groups": flags["num_query_groups"] if flags.get("group_query_attention") else flags["num_attention_heads"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": flags.get("norm_epsilon", 1e-5),
        "layernorm_zero_centered_gamma": flags.get("apply_layernorm_1p", False),
        **_windows(flags),
        # The spec of latent attention contains these norms; with the flag on, Megatron would sum their equal gradients over the TP ranks.
        "qk_layernorm": flags.get("qk_layernorm", False) and not flags.get("multi_latent_attention"),
        "add_bias_linear": not flags.get("disable_bias_linear", False),
        "gated_linear_unit": True,
        "activation_func": gelu_tanh if is_gelu else F.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _windows(flags: Mapping[str, Any]) -> Fields:
    """Return the fields of layers with a sliding window, given as (tokens before, tokens after); empty if there are none."""
    if flags.get("window_size") is None:
        return {}
    layers = flags.get("window_attn_skip_freq")
    return {"window_size": tuple(flags["window_size"]), "window_attn_skip_freq": read_layers(layers) if isinstance(layers, str) else layers}


def _experts(settings: MegatronTrainerSettings) -> Fields:
    """Return the fields of MTP layers and experts. By default routers are float32, without balancing loss or expert bias updates."""
    flags, on_cuda = settings.model_flags, settings.device == "cuda"
    mtp = {"mtp_num_layers": settings.num_mtp_layers or None}
    if not flags.get("num_experts"):
        return mtp
    frequency = flags.get("moe_layer_freq", 1)
    return {
        **mtp,
        **_given(flags, EXPERTS),
        "num_moe_experts": flags["num_experts"],
        "moe_layer_freq": read_layers(frequency) if isinstance(frequency, str) else frequency,
        "moe_router_dtype": flags.get("moe_router_dtype", "fp32"),
        "moe_router_load_balancing_type": flags.get("moe_router_load_balancing_type", "none"),
        "moe_aux_loss_coeff": flags.get("moe_aux_loss_coeff", 0.0),
        "moe_router_bias_update_rate": flags.get("moe_router_bias_update_rate", 0.0),
        "moe_enable_deepep": settings.deepep,
        "moe_grouped_gemm": on_cuda,
        "moe_permute_fusion": on_cuda and flags.get("moe_permute_fusion", False),
    }


def _given(flags: Mapping[str, Any], names: Iterable[str]) -> Fields:
    return {name: flags[name] for name in names if flags.get(name) is not None}


def _parallelism(settings: MegatronTrainerSettings) -> Fields:
    layout, flags = settings.layout, settings.model_flags
    # Rows differ in length, which the all-gather dispatcher does not support; it is Megatron's default even without experts.
    dispatcher = settings.dispatcher if flags.get("num_experts") else "alltoall"
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.num_layers_first_stage,
        "num_layers_in_last_pipeline_stage": layout.num_layers_last_stage,
        **_given(flags, ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")),
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "pipeline_dtype": DTYPES[settings.precision],
        # Interleaved stages overlap their communication, and Megatron's schedule frees an output before it waits for the transfer
        # (`schedules.py`, `pp_pre_forward`), so the next stage would receive garbage over gloo.
        "deallocate_pipeline_outputs": layout.vpp == 1,
        # Interleaved stages communicate pairwise: batched sends and receives deadlock over gloo, and do not overlap over NCCL.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "variable_seq_lengths": layout.pp > 1 and dispatcher != "allgather",
        "moe_token_dispatcher_type": dispatcher,
    }


def _computation(settings: MegatronTrainerSettings) -> Fields:
    """Return the fields of numerics, recomputation and kernels: TransformerEngine's on CUDA, else plain torch.

    Gradients are never averaged over ranks or micro-batches, because the token weights include all denominators.
    """
    flags, on_cuda, parallel = settings.model_flags, settings.device == "cuda", settings.parallel
    return {
        "params_dtype": DTYPES[settings.precision],
        "bf16": settings.precision == "bf16",
        # Linear layers alone: attention, norms, router, embedding and output layer stay in bf16, and so do the weights themselves.
        **({"fp8": flags["fp8_format"], "fp8_recipe": flags["fp8_recipe"]} if settings.uses_fp8 else {}),
        "calculate_per_token_loss": True,
        "attention_softmax_in_fp32": True,
        "init_method_std": 0.02,
        "recompute_granularity": parallel.recompute_granularity,
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
        "recompute_modules": list(parallel.recompute_modules) or None,
        "transformer_impl": "transformer_engine" if on_cuda else "local",
        "attention_backend": AttnBackend[settings.attention_backend],
        "apply_rope_fusion": on_cuda and not flags.get("no_rope_fusion") and not flags.get("multi_latent_attention"),
        "bias_activation_fusion": on_cuda and settings.activation is Activation.SILU,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,  # done by `model.build_chunks`; Megatron's layers would need apex
    }
