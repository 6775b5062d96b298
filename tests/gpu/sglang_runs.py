"""Runs of `fuligo train` on GPUs with SGLang."""

import json
import os
import subprocess
import sys

PYTHON = os.environ.get("FULIGO_SGLANG_PYTHON")
"""Interpreter with SGLang; tests are skipped without it."""
ENGINES: dict[str, object] = {
    "device": "cuda",
    "precision": "bf16",
    "check_weight_update_equal": True,
    "engine_python": PYTHON,
    "engine_env": json.dumps({"PYTHONPATH": os.environ.get("FULIGO_SGLANG_PYTHONPATH", "")}),
    "sglang_attention_backend": "triton",
    "sglang_sampling_backend": "pytorch",
    "sglang_mem_fraction_static": 0.3,
    "sglang_max_total_tokens": 65536,
    "sglang_disable_prefill_cuda_graph": True,
    "sglang_dtype": "bfloat16",
    "progress": "plain",
}
"""Flags of small engines with kernels that every installation has."""


def train_on_sglang(*, timeout_s: float, **flags: object) -> None:
    """Train with `ENGINES` and more flags: True is a switch, None leaves a flag out."""
    words = [
        word
        for name, value in {**ENGINES, **flags}.items()
        if value is not None
        for word in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]
    done = subprocess.run([sys.executable, "-m", "fuligo", "train", *words], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
