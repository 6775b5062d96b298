"""The flags of the group `parallel`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class ParallelFlags(FlagGroup):
    """Parallelism and recomputation of the Megatron trainer. Names and meanings are Megatron's."""

    tensor_model_parallel_size: int = flag(1, "tensor-parallel size (TP): GPUs that share each matrix", source="megatron", ge=1)
    sequence_parallel: bool = flag(False, "split norms and residuals along the sequence over the TP group (SP)", source="megatron")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (PP)", source="megatron", ge=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "interleaved stages per pipeline rank (VPP; default: one)", source="megatron", ge=1
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first stage; the middle stages share the rest equally", unit="layers", source="megatron", ge=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last stage; the middle stages share the rest equally", unit="layers", source="megatron", ge=1
    )
    context_parallel_size: int = flag(1, "context-parallel size (CP): GPUs that share each sequence", source="megatron", ge=1)
    allgather_cp: bool = flag(False, "gather keys and values for context parallelism (required by sparse attention)", source="slime")
    expert_model_parallel_size: int = flag(1, "expert-parallel size (EP): groups of GPUs that share the experts", source="megatron", ge=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "tensor-parallel size within an expert (ETP; default --tensor-model-parallel-size)", source="megatron", ge=1
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "recompute activations in the backward pass: of whole layers (full), or of --recompute-modules (selective)", source="megatron"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "full recomputation in chunks of layers (uniform), or of the first layers of each stage (block)", source="megatron"
    )
    recompute_num_layers: int | None = flag(
        None, "layers per chunk (uniform), or layers to recompute (block)", unit="layers", source="megatron", ge=1
    )
    recompute_modules: list[str] = flag(
        [],
        "modules of selective recomputation: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe (default core_attn)",
        source="megatron",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "allgather", "dispatcher that sends tokens to their experts", source="megatron"
    )
    moe_enable_deepep: bool = flag(False, "dispatch with DeepEP; needs --moe-token-dispatcher-type flex", source="megatron")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto", "attention kernels of TransformerEngine", source="megatron"
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "reduce gradients in fp32; this is the default unless --grad-reduce-in-bf16 is given", source="megatron"
    )
