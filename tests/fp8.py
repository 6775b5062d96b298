"""Tiny checkpoints whose matrices fit FP8 blocks, and the numbers of FP8 by definition."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from fuligo.formats.quantization import Quantization
from tests import tiny

_MLA = {
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict] = {
    "qwen3": {"head_dim": 128},
    "qwen2": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "glm4": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "head_dim": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**_MLA, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v32": {
        **_MLA,
        **{"n_group": 2, "topk_group": 1, "num_experts": 4, "first_k_dense_replace": 1},
        **{"index_n_heads": 2, "index_head_dim": 128, "index_topk": 16},
    },
    "glm4_moe_lite": {**_MLA, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**_MLA, "index_n_heads": 2, "index_head_dim": 128, "index_topk": 16, "first_k_dense_replace": 1},
}
_SHAPE = {
    "vocab_size": 400,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": tiny.PAD_ID,
    "bos_token_id": tiny.BOS_ID,
    "eos_token_id": tiny.EOS_ID,
    "dtype": "bfloat16",
}


def save_family(directory: Path, family: str, *, num_files: int = 1, seed: int = 0, **overrides: object) -> Path:
    """Save a bf16 Hugging Face directory with random weights; return `directory`.

    As in published checkpoints, the correction of routers' scores is in float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()
    model.generation_config = GenerationConfig(eos_token_id=tiny.EOS_ID)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=2 * num_bytes if num_files == 1 else num_bytes // num_files)
    tiny.tokenizer().save_pretrained(directory)
    return directory


def e4m3_numbers() -> np.ndarray:
    """Return the finite numbers of float8 e4m3 from 0 up, by definition: exponent bias 7, 3 bits of mantissa, subnormal below 2**-6."""
    subnormal = np.arange(8) * 2.0**-9
    normal = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return np.concatenate([subnormal, normal[:-1]])  # the last pattern is NaN


def half_steps(values: np.ndarray) -> np.ndarray:
    """Return half the distance between neighboring e4m3 numbers around each of `values` (the wider one at powers of two)."""
    numbers = e4m3_numbers()
    steps = np.append(np.diff(numbers), numbers[-1] - numbers[-2])
    return steps[np.searchsorted(numbers, np.abs(values))] / 2


def dequantize(values: Tensor, scales: Tensor, quantization: Quantization) -> Tensor:
    """Return values * scale as [rows, columns] float32."""
    height, width = values.shape
    rows, columns = quantization.block_of((height, width))
    of_rows = scales.reshape(-(-height // rows), -1).repeat_interleave(rows, 0)[:height]
    return values.float() * of_rows.repeat_interleave(columns, 1)[:, :width]
