"""The flags of the group `parallel`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class ParallelFlags(FlagGroup):
    """How Megatron splits the model and the work over GPUs, and what it recomputes. Names and meanings are Megatron's."""

    tensor_model_parallel_size: int = flag(1, "GPUs that share each matrix (TP)", source="megatron", ge=1)
    sequence_parallel: bool = flag(False, "split norms and residuals along the sequence over the TP group", source="megatron")
    pipeline_model_parallel_size: int = flag(1, "stages that the layers are cut into (PP)", source="megatron", ge=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "interleaved stages of each pipeline rank (VPP; default: one)", source="megatron", ge=1
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first stage; the middle ones share the rest equally", unit="layers", source="megatron", ge=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last stage; the middle ones share the rest equally", unit="layers", source="megatron", ge=1
    )
    context_parallel_size: int = flag(1, "GPUs that share each sequence (CP)", source="megatron", ge=1)
    allgather_cp: bool = flag(False, "context parallelism by gathering keys and values (sparse attention needs it)", source="slime")
    expert_model_parallel_size: int = flag(1, "groups of GPUs that the experts are spread over (EP)", source="megatron", ge=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "GPUs that share each expert's matrices (ETP; default --tensor-model-parallel-size)", source="megatron", ge=1
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "activations computed again in the backward pass: of whole layers, or of --recompute-modules", source="megatron"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "full recomputation of every layer in chunks (uniform), or of the first layers of a stage (block)", source="megatron"
    )
    recompute_num_layers: int | None = flag(
        None, "layers of a chunk (uniform), or layers to recompute (block)", unit="layers", source="megatron", ge=1
    )
    recompute_modules: list[str] = flag(
        [],
        "modules of selective recomputation: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe (default core_attn)",
        source="megatron",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "allgather", "how tokens reach their experts", source="megatron"
    )
    moe_enable_deepep: bool = flag(False, "dispatch by DeepEP; goes with --moe-token-dispatcher-type flex", source="megatron")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto", "TransformerEngine's attention kernels", source="megatron"
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "gradients are summed in fp32; they are anyway, unless --grad-reduce-in-bf16 is given", source="megatron"
    )
