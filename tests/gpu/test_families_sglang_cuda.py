"""Layers of published shapes of newer families: SGLang on a GPU scores as the trainer's own bfloat16 model, before and after a weight sync.

Each model has random weights, few layers, fewer experts and a small vocabulary. FULIGO_SGLANG_PYTHON and FULIGO_SGLANG_PYTHONPATH are as in
test_sglang_cuda.py; one GPU holds engine and trainer. A family takes about a minute, most of it SGLang's start:

    python -m pytest -s tests/gpu/test_families_sglang_cuda.py -k gpt_oss
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from fuligo.engines.host import PortClaims
from fuligo.trainer.ranks.world import join_world
from tests.served_families import (
    DEEPSEEK_KEYS,
    GEMMA_CONSTANTS,
    GEMMA_PROCESSOR,
    GPT_OSS_KEYS,
    MINIMAX_KEYS,
    QWEN3_5_IN_FLOAT32,
    QWEN_PROCESSOR,
    Scores,
    ServedFamily,
    compare,
)
from tests.sglang.engines import server_settings

pytestmark = pytest.mark.skipif("FULIGO_SGLANG_PYTHON" not in os.environ, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang")

FACTOR = 2.0
"""Largest difference of the engine from float32, in multiples of the difference of the trainer's own bfloat16 model."""
ROUNDED_LOGITS = 0.01
"""Nats added to that for SGLang's logits, which are bfloat16; the trainer's are float32."""
SIZES = {"vocab_size": 8192, "max_position_embeddings": 8192, "tie_word_embeddings": False}
ARGUMENTS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.45,
    "max_total_tokens": 32768,
    "max_running_requests": 16,
    "cuda_graph_max_bs_decode": 8,
    "disable_prefill_cuda_graph": True,
}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = {
    **SIZES,
    **LATENT,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "original_max_position_embeddings": 4096}
QWEN3_5 = {
    **SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
QWEN3_5_KEYS = {"full_attention_interval": 4, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
QWEN3_5_TOWER = {  # 27 blocks
    "depth": 2,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
FAMILIES = {
    "qwen3_5": ServedFamily(  # Qwen3.5-27B: 64 layers
        {
            **QWEN3_5,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
        served=QWEN3_5_KEYS,
        whole={"vision_config": {**QWEN3_5_TOWER, "out_hidden_size": 5120}},
        processor=QWEN_PROCESSOR,
        in_float32=QWEN3_5_IN_FLOAT32,
        arguments={"mm_attention_backend": "sdpa"},
    ),
    "qwen3_5_moe": ServedFamily(  # Qwen3.5-35B-A3B: 40 layers, 256 experts
        {
            **QWEN3_5,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        served=QWEN3_5_KEYS,
        whole={"vision_config": {**QWEN3_5_TOWER, "out_hidden_size": 2048}},
        processor=QWEN_PROCESSOR,
        in_float32=QWEN3_5_IN_FLOAT32,
        arguments={"mm_attention_backend": "sdpa"},
    ),
    "gemma4": ServedFamily(  # heads, windows and embeddings per layer of Gemma 4 E4B; the last two layers take the keys of earlier ones
        {
            **SIZES,
            "tie_word_embeddings": True,
            "num_hidden_layers": 8,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention", "full_attention"],
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 8192,
            "sliding_window": 512,
            "final_logit_softcapping": 30.0,
        },
        whole={
            "vision_config": {"num_hidden_layers": 2, "use_clipped_linears": True},
            **{"image_token_id": 258_880, "video_token_id": 258_884},
        },
        processor=GEMMA_PROCESSOR,
        constants=rf"{GEMMA_CONSTANTS}|layers\.[67]\.self_attn\.k_norm\.weight$",
        arguments={"mm_attention_backend": "sdpa"},
    ),
    "kimi_k2": ServedFamily(  # Kimi K2 Instruct: 61 layers, 384 experts
        {
            **DEEPSEEK,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 16,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {
                **YARN,
                **{"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
        served=DEEPSEEK_KEYS,
    ),
    "deepseek_v32": ServedFamily(  # DeepSeek-V3.2: 61 layers, 256 experts; sequences longer than index_topk
        {
            **DEEPSEEK,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 16,
            "num_experts": 16,  # transformers 5.12.1 builds this many
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
            "mlp_layer_types": ["dense", "sparse"],
        },
        served=DEEPSEEK_KEYS,
        arguments={
            "attention_backend": "dsa",
            "dsa_prefill_backend": "flashmla_sparse",
            "dsa_decode_backend": "flashmla_sparse",
            "kv_cache_dtype": "bfloat16",
        },
        environment={"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"},
        is_trained=False,  # by Megatron only
        lengths=(2600, 300),
    ),
    "qwen3_next": ServedFamily(  # Qwen3-Next-80B-A3B: 48 layers, 512 experts
        {
            **SIZES,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 64,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        served={"full_attention_interval": 4},
    ),
    "gpt_oss": ServedFamily(  # gpt-oss-20b: 24 layers, 32 experts
        {
            **SIZES,
            "num_hidden_layers": 2,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "factor": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        served=GPT_OSS_KEYS,
    ),
    "gemma3_text": ServedFamily(  # Gemma 3 1B: 26 layers
        {
            **SIZES,
            "tie_word_embeddings": True,
            "num_hidden_layers": 6,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "minimax_m2": ServedFamily(  # MiniMax-M2: 62 layers, 256 experts
        {
            **SIZES,
            "num_hidden_layers": 2,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
        },
        served={**MINIMAX_KEYS, "rotary_dim": 64},
    ),
    "mistral": ServedFamily(  # Mistral 7B v0.3: 32 layers
        {
            **SIZES,
            "num_hidden_layers": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def cuda_world() -> Iterator[None]:
    """Join a world of one rank with a process group, which half precision under FSDP needs."""
    join_world(0, 1, "cuda", store=HashStore(), key=None, timeout_s=60)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FAMILIES)
async def test_scores_are_within_the_models_own_rounding_and_every_weight_arrives(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    checkpoint = family.save(tmp_path / "model", name, device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    with PortClaims() as claims:
        settings = server_settings(
            "engine",
            checkpoint,
            claims,
            tmp_path / "engine.txt",
            device="cuda",
            arguments={**ARGUMENTS, **family.arguments},
            environment={"PYTHONPATH": os.environ.get("FULIGO_SGLANG_PYTHONPATH", ""), **family.environment},
        )
        found = await compare(family, settings, counts_tensors=True)
    print(f"{name}: {found.num_tensors} tensors, weights moved log-probabilities by {found.moved:.2e}; loaded: {found.loaded}; "
          f"synced: {found.synced}; seconds {found.seconds}")  # fmt: skip
    for scores in (found.loaded, found.synced):
        _require_within_rounding(scores)
    assert found.moved > 4 * (found.loaded.noise + ROUNDED_LOGITS), "or old weights would pass"
    assert found.num_tensors > 0
    assert [name for name in found.unchanged if not re.search(family.constants, name)] == [] and found.not_restored == []


def _require_within_rounding(scores: Scores) -> None:
    allowed = FACTOR * scores.noise + ROUNDED_LOGITS
    assert scores.prefill <= allowed and scores.decode <= allowed, f"{scores}; allowed are {allowed:.2e}"
