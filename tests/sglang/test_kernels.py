"""Kernels that `fuligo_kernels` compiles have the names that an engine looks for."""

import json
from pathlib import Path

from fuligo.engines.sglang.ahead import fuligo_kernels
from tests.sglang.engines import run_program

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "dtype": "bfloat16",
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "float16",
}
FOUND_ON_A_GPU = ["activation_bf16_t_true", "clamp_position_int64_t", "fused_rope_true_64_true_bf16_t", "kvcache_384_true"]
"""All kernels in the cache after an engine of SmolLM2-135M had served a rollout on an H200, 2026-11-28."""


FOR_QWEN3 = ["activation_fp16_t_true", "fused_rope_true_128_true_fp16_t", "kvcache_1024_true", "qknorm_128_true_fp16_t"]
"""Kernels of Qwen3-4B in float16 under tensor parallelism 2, in addition to `clamp_position`."""


def test_kernels_have_the_names_that_an_engine_looks_for() -> None:
    kernels = fuligo_kernels.kernels(SMOLLM2, 1, "auto", "auto") + fuligo_kernels.kernels(QWEN3, 2, "auto", "auto")[1:]
    lines = run_program("kernel_names", Path(fuligo_kernels.__file__).parent, json.dumps(kernels))
    assert json.loads(lines[-1]) == [[], sorted(f"sgl_kernel_jit_{name}" for name in FOUND_ON_A_GPU + FOR_QWEN3)]
