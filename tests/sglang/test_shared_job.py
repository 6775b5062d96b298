"""Colocated runs whose engines die while they sample and while they sleep."""

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from tests.e2e.conftest import Start, start
from tests.e2e.records import metrics, sample_rows
from tests.sglang.engines import ENVIRONMENT, sglang_python

__all__ = ["start"]

ASSETS = Path(str(files("fuligo.quickstart"))) / "assets"
NUM_GROUPS = 8
NUM_SAMPLES = 8 * NUM_GROUPS


@pytest.mark.parametrize(
    ("num_engines", "launcher"),
    [(2, "local"), pytest.param(1, "local", marks=pytest.mark.slow), pytest.param(2, "ray", marks=pytest.mark.slow)],
)
def test_the_run_outlives_engines_that_share_its_devices(start: Start, num_engines: int, launcher: str, tmp_path: Path) -> None:
    """Weight syncs are checked, and no sample is of older weights: a restarted engine waits for the next sync.

    A single engine is restarted with the current weights at once; rollout and sync wait for it.
    """
    run_dir, num_rollout = tmp_path / "run", 5
    task = [
        *("--config", ASSETS / "config.yaml", "--hf-checkpoint", ASSETS / "model", "--prompt-data", ASSETS / "train.jsonl"),
        *("--eval-prompt-data", f"{ASSETS / 'test.jsonl'}@[:2]", "--skip-eval-before-train", "--run-dir", run_dir, "--progress", "plain"),
        *("--rollout-backend", "sglang", "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", num_engines, "--colocate"),
        *("--rollout-batch-size", NUM_GROUPS, "--lr", 2e-4),
        *("--engine-python", sglang_python(), "--engine-env", json.dumps(ENVIRONMENT), "--router-policy", "round_robin"),
        *(
            "--launcher",
            launcher,
            "--rollout-concurrency",
            32,
            "--use-fault-tolerance",
            "--rollout-health-check-timeout",
            120,  # on a busy machine a living engine may be slow to answer
            "--check-weight-update-equal",
            "--num-rollout",
            num_rollout,
        ),
        *("--dynamic-sampling-filter-path", "tests.sglang.engine_killers.keep_all"),
        *("--before-train-step-path", "tests.sglang.engine_killers.before_train_step"),
    ]
    process = start("train", *task, warm=True, KILL_ENGINES=f"sampling:1:0 training:2:{num_engines - 1}")
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert said.count("retrying its requests on other engines and restarting it") == 2, said

    steps = metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(num_rollout))
    assert all(step["rollout/num_groups_kept"] == NUM_GROUPS and step["rollout/num_failed"] == 0 for step in steps)
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-3
    assert steps[-1]["rollout/reward_mean"] > steps[0]["rollout/reward_mean"]
    rows = sample_rows(run_dir, "index", "kept", "engine", "versions")
    assert sorted(row["index"] for row in rows) == list(range(num_rollout * NUM_SAMPLES)), "each sample is there once"
    assert all(row["kept"] and set(row["versions"]) == {row["step"]} for row in rows)
    by_engine = [Counter(row["engine"] for row in rows if row["step"] == step) for step in range(num_rollout)]
    assert set(by_engine[0]) == set(by_engine[-1]) == set(range(num_engines))
    if num_engines == 2:
        assert by_engine[1][1] >= NUM_SAMPLES / 2, (
            "engine 1 took over requests of the dead engine; later ones may have gone to its successor"
        )
