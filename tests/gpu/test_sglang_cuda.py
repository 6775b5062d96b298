"""Real SGLang engines on one GPU, the trainer on another: weights by NCCL, and the quickstart's reward rises.

FULIGO_SGLANG_PYTHON is the interpreter that has SGLang and its router, FULIGO_SGLANG_PYTHONPATH what it needs on its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

ASSETS = Path(str(files("fuligo.quickstart"))) / "assets"
PYTHON = os.environ.get("FULIGO_SGLANG_PYTHON")

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the trainer needs one GPU, the engine another"),
]


@pytest.mark.parametrize(("transport", "mode"), [("nccl", "sync"), ("nccl", "one-step"), ("disk", "sync")])
def test_the_reward_rises_on_two_gpus(tmp_path: Path, transport: str, mode: str) -> None:
    run_dir = tmp_path / "run"
    flags: dict[str, object] = {
        "config": ASSETS / "config.yaml",
        "hf_checkpoint": ASSETS / "model",
        "prompt_data": ASSETS / "train.jsonl",
        "eval_prompt_data": ASSETS / "test.jsonl",
        "run_dir": run_dir,
        "num_rollout": 12,
        "device": "cuda",
        "precision": "bf16",
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "async_mode": mode,
        "update_weight_transport": transport,
        "check_weight_update_equal": True,
        "engine_python": PYTHON,
        "engine_env": json.dumps({"PYTHONPATH": os.environ.get("FULIGO_SGLANG_PYTHONPATH", "")}),
        "sglang_attention_backend": "triton",
        "sglang_sampling_backend": "pytorch",
        "sglang_mem_fraction_static": 0.3,
        "sglang_disable_prefill_cuda_graph": True,
        "sglang_dtype": "bfloat16",
        "progress": "plain",
    }
    words = [
        word
        for name, value in flags.items()
        for word in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]
    done = subprocess.run([sys.executable, "-m", "fuligo", "train", *words], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 12
    assert steps[-1]["rollout/reward_mean"] > steps[0]["rollout/reward_mean"] + 0.3
    assert all(step["train/logprob_abs_diff"] < 0.05 for step in steps)
