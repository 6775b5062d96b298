"""Whole runs with --exact-on-policy on SGLang: engine and trainer compute the same log-probabilities to the last bit, in every step.

FULIGO_SGLANG_PYTHON and FULIGO_SGLANG_PYTHONPATH are as in test_sglang_cuda.py; engine and trainer share the GPUs.
"""

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.e2e.records import metrics
from tests.gpu.sglang_runs import PYTHON, train_on_sglang

ASSETS = Path(str(files("fuligo.quickstart"))) / "assets"
MAIN_SIZES = {"hidden": 256, "layers": 3}

pytestmark = pytest.mark.skipif(PYTHON is None, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang")


def exact_steps(run_dir: Path, checkpoint: Path, **changes: object) -> list[dict[str, float]]:
    """Train on the quickstart's task; `fuligo train` itself ends with an error if one log-probability differs."""
    flags: dict[str, object] = {
        "config": ASSETS / "config.yaml",
        "hf_checkpoint": checkpoint,
        "prompt_data": ASSETS / "train.jsonl",
        "eval_prompt_data": ASSETS / "test.jsonl",
        "run_dir": run_dir,
        "num_rollout": 6,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "colocate": True,
        "train_backend": "torch",
        "exact_on_policy": True,
        "sglang_cuda_graph_max_bs_decode": 64,
    }
    train_on_sglang(timeout_s=400, **{**flags, **changes})
    return metrics(run_dir)


def model(directory: Path, family: str) -> Path:
    head = {"head_dim": 64} if family.startswith("qwen3") else {}
    return tiny.save_checkpoint(directory, family, **MAIN_SIZES, **head)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_log_probabilities_are_the_engines(tmp_path: Path, family: str) -> None:
    steps = exact_steps(tmp_path / "run", model(tmp_path / "model", family))
    assert [step["train/logprob_abs_diff"] for step in steps] == [0.0] * 6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="an engine on two GPUs needs them")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_log_probabilities_are_those_of_an_engine_on_two_gpus(tmp_path: Path, family: str) -> None:
    """tp2: the trainer's two ranks repeat the roundings of the engine's two."""
    on_two = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
    steps = exact_steps(tmp_path / "run", model(tmp_path / "model", family), **on_two)
    assert [step["train/logprob_abs_diff"] for step in steps] == [0.0] * 6


def test_the_quickstart_learns(tmp_path: Path) -> None:
    steps = exact_steps(tmp_path / "run", ASSETS / "model", num_rollout=12)
    assert [step["train/logprob_abs_diff"] for step in steps] == [0.0] * 12
    assert steps[-1]["rollout/reward_mean"] > steps[0]["rollout/reward_mean"] + 0.2
