"""Two ranks, two SGLang engines and the router, all placed by Ray: the quickstart's task until the reward rises."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.processes import alive, descendants, wait_until
from tests.e2e.records import metrics
from tests.sglang.engines import ENVIRONMENT, sglang_python

ASSETS = Path(str(files("fuligo.quickstart"))) / "assets"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: make install-sglang"),
]


def test_the_reward_rises(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        "train",
        *("--config", ASSETS / "config.yaml", "--hf-checkpoint", ASSETS / "model", "--prompt-data", ASSETS / "train.jsonl"),
        *("--run-dir", run_dir, "--num-rollout", 6, "--progress", "plain", "--device", "cpu", "--skip-eval-before-train"),
        *("--launcher", "ray", "--actor-num-gpus-per-node", 2, "--rollout-backend", "sglang", "--rollout-num-gpus", 2),
        *("--engine-python", sglang_python(), "--engine-env", json.dumps(ENVIRONMENT), "--router-policy", "round_robin"),
        *("--eval-prompt-data", ASSETS / "test.jsonl", "--check-weight-update-equal"),
    )
    wait_until(lambda: len(metrics(run_dir)) >= 2 or process.poll() is not None, "two steps are recorded", timeout_s=400)
    family = descendants(process.pid)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert sum("sglang.launch_server" in command and "guard" not in command for command in family.values()) == 2, family

    steps = metrics(run_dir)
    rewards = [step["rollout/reward_mean"] for step in steps]
    assert len(steps) == 6
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-3
    wait_until(lambda: not alive(family), "all processes have ended", timeout_s=60)
