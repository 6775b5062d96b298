"""Cases of `training.py`: models of published shapes and their training settings."""

from dataclasses import dataclass, field
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 512, "tie_word_embeddings": False,
    },
    "tiny-dense": {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "vocab_size": 154880, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one measurement."""

    model: str
    num_gpus: int = 1
    num_layers: int | None = None
    """Number of layers; None: as published."""
    max_tokens: int = 16384
    """Tokens of a row, per context-parallel rank."""
    num_rows: int = 4
    """Micro-batches per optimizer step and data-parallel rank."""
    flags: tuple[str, ...] = field(default_factory=tuple)
    backend: str = "megatron"
    sample_tokens: int | None = None
    """Tokens of every sample; None: mixed lengths of 256 to 4,096."""


ALLTOALL = ("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--moe-permute-fusion")
FULL_RECOMPUTATION = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
CPU_ADAM = ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer")
TORCH = ("--precision", "bf16")
TORCH_EAGER = (*TORCH, "--no-torch-compile")
LORA = ("--lora-rank", "16", "--lr", "1e-5")
CASES: dict[str, Case] = {
    "tiny": Case("tiny", max_tokens=1024, num_rows=2),
    "small": Case("qwen3-0.6b"),
    "dense": Case("qwen3-4b", max_tokens=12288, num_rows=6),
    "dense-recompute": Case("qwen3-4b", flags=FULL_RECOMPUTATION),
    "dense-12": Case("qwen3-4b", num_layers=12),
    "dense-cpu-adam": Case("qwen3-4b", max_tokens=12288, num_rows=6, flags=CPU_ADAM),
    "moe": Case("qwen3-30b-a3b", num_layers=7, flags=ALLTOALL),
    "moe-recompute": Case("qwen3-30b-a3b", num_layers=7, flags=(*ALLTOALL, *FULL_RECOMPUTATION)),
    "moe-lora": Case("qwen3-30b-a3b", num_layers=16, flags=(*ALLTOALL, *LORA)),
    "mla": Case("glm-4.7-flash", num_layers=6, flags=ALLTOALL),
    "dense-short": Case("qwen3-4b", max_tokens=12288, num_rows=6, sample_tokens=230),
    "torch": Case("qwen3-4b", max_tokens=12288, num_rows=6, flags=TORCH, backend="torch"),
    "torch-short": Case("qwen3-4b", max_tokens=12288, num_rows=6, sample_tokens=230, flags=TORCH, backend="torch"),
    "torch-short-12": Case("qwen3-4b", num_layers=12, max_tokens=12288, num_rows=6, sample_tokens=230, flags=TORCH, backend="torch"),
    "torch-recompute": Case("qwen3-4b", flags=(*TORCH, "--gradient-checkpointing"), backend="torch"),
    "torch-lora": Case("qwen3-4b", max_tokens=12288, num_rows=6, flags=(*TORCH, *LORA), backend="torch"),
    "torch-lora-eager": Case("qwen3-4b", max_tokens=12288, num_rows=6, flags=(*TORCH_EAGER, *LORA), backend="torch"),
    "torch-qlora": Case(
        "qwen3-4b", max_tokens=12288, num_rows=6, flags=(*TORCH, *LORA, "--lora-base-precision", "nf4"), backend="torch"
    ),
    "torch-qlora-moe": Case(
        "qwen3-30b-a3b", num_layers=16, flags=(*TORCH, *LORA, "--lora-base-precision", "nf4"), backend="torch"
    ),
    "torch-lora-moe": Case("qwen3-30b-a3b", num_layers=16, flags=(*TORCH, *LORA), backend="torch"),
    "torch-lora-experts": Case("qwen3-30b-a3b", num_layers=16, flags=(*TORCH, *LORA, "--lora-experts"), backend="torch"),
    "torch-lora-tiny": Case("tiny", max_tokens=1024, num_rows=2, flags=(*TORCH, *LORA, "--lora-experts"), backend="torch"),
    "torch-small": Case("qwen3-0.6b", flags=TORCH, backend="torch"),
    "torch-small-eager": Case("qwen3-0.6b", flags=TORCH_EAGER, backend="torch"),
    "torch-tiny": Case("tiny-dense", max_tokens=1024, num_rows=2, flags=TORCH, backend="torch"),
    "dense-dp2": Case("qwen3-4b", 2, max_tokens=12288, num_rows=6),
    "dense-tp2": Case("qwen3-4b", 2, flags=("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "dense-cp2": Case("qwen3-4b", 2, max_tokens=8192, flags=("--context-parallel-size", "2")),
    "dense-pp2": Case("qwen3-4b", 2, max_tokens=8192, num_rows=8, flags=("--pipeline-model-parallel-size", "2")),
    "moe-ep2": Case("qwen3-30b-a3b", 2, num_layers=7, flags=("--expert-model-parallel-size", "2", *ALLTOALL)),
    "moe-tp2-ep2": Case(
        "qwen3-30b-a3b", 2, num_layers=7,
        flags=("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2",
               "--expert-tensor-parallel-size", "1", *ALLTOALL),
    ),
    "mla-tp2-ep2": Case(
        "glm-4.7-flash", 2, num_layers=6,
        flags=("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2",
               "--expert-tensor-parallel-size", "1", *ALLTOALL),
    ),
    "dense-dp4": Case("qwen3-4b", 4, max_tokens=12288, num_rows=6),
    "dense-tp4": Case("qwen3-4b", 4, flags=("--tensor-model-parallel-size", "4", "--sequence-parallel")),
    "moe-ep4": Case("qwen3-30b-a3b", 4, num_layers=7, flags=("--expert-model-parallel-size", "4", *ALLTOALL)),
    "moe-deep-ep4": Case(
        "qwen3-30b-a3b", 4, num_layers=18, flags=("--expert-model-parallel-size", "4", *ALLTOALL, *FULL_RECOMPUTATION)
    ),
    "moe-deep-tp2-ep4": Case(
        "qwen3-30b-a3b", 4, num_layers=18,
        flags=("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "4",
               "--expert-tensor-parallel-size", "1", *ALLTOALL, *FULL_RECOMPUTATION),
    ),
    "moe-full-ep4": Case(
        "qwen3-30b-a3b", 4, flags=("--expert-model-parallel-size", "4", *ALLTOALL, *FULL_RECOMPUTATION, *CPU_ADAM),
    ),
    "mla-tp2-ep4": Case(
        "glm-4.7-flash", 4, num_layers=12,
        flags=("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "4",
               "--expert-tensor-parallel-size", "1", *ALLTOALL),
    ),
    "dense-dp4-recompute": Case("qwen3-4b", 4, flags=FULL_RECOMPUTATION),
    "dense-vpp2": Case(
        "qwen3-4b", 2, num_layers=12, max_tokens=8192, num_rows=8,
        flags=("--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "2"),
    ),
}  # fmt: skip
