"""The quickstart's task on one or two ranks, two SGLang engines and the router, all placed by Ray."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from tests.e2e.command import succeed
from tests.e2e.conftest import Start
from tests.e2e.processes import alive, descendants, wait_until
from tests.e2e.records import metrics
from tests.sglang.engines import ENVIRONMENT, sglang_python

ASSETS = Path(str(files("fuligo.quickstart"))) / "assets"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: make install-sglang"),
]


def task(run_dir: Path) -> list[object]:
    """Return the quickstart's task on SGLang engines, with checked weight syncs."""
    return [
        *("--config", ASSETS / "config.yaml", "--hf-checkpoint", ASSETS / "model", "--prompt-data", ASSETS / "train.jsonl"),
        *("--run-dir", run_dir, "--progress", "plain", "--device", "cpu", "--skip-eval-before-train"),
        *("--launcher", "ray", "--rollout-backend", "sglang", "--rollout-num-gpus", 2, "--router-policy", "round_robin"),
        *("--engine-python", sglang_python(), "--engine-env", json.dumps(ENVIRONMENT)),
        *("--eval-prompt-data", f"{ASSETS / 'test.jsonl'}@[:2]", "--check-weight-update-equal"),
    ]


@pytest.mark.slow
def test_an_engine_spans_two_nodes(free_port: int, tmp_path: Path) -> None:
    """The rank is on one Ray node, the engine's tensor parallelism spans two others; weights travel by broadcast."""
    run_dir, hosts = tmp_path / "run", tmp_path / "hosts"
    hosts.write_text("".join(f"127.0.0.{number} slots=1\n" for number in (2, 3, 4)))
    sizes = ["--num-rollout", 2, "--num-gpus-per-node", 1, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus-per-engine", 2]
    succeed("launch", "--hostfile", hosts, "--head-port", free_port, "--ssh", "bash -c {command}", "--", *task(run_dir), *sizes)
    steps = metrics(run_dir)
    assert len(steps) == 2
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-3
    assert {path.name for path in run_dir.glob("engine-*")} == {"engine-0-node-0.txt", "engine-0-node-1.txt"}


@pytest.mark.parametrize(
    ("placement", "num_rollouts"),
    [
        (("--actor-num-gpus-per-node", 1, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4), 3),
        pytest.param(("--actor-num-gpus-per-node", 2, "--colocate"), 6, marks=pytest.mark.slow),
    ],
    ids=["separate", "colocated"],
)
def test_ranks_and_engines_agree(
    start: Start, warm_workers: dict[str, str], tmp_path: Path, placement: tuple[str, ...], num_rollouts: int
) -> None:
    """Colocated, they take turns, each rank hands its weights to the engine beside it, and the reward rises.

    tests/sglang/test_job.py checks that it rises with separate engines; test_launch.py and test_ends.py have two separate ranks.
    """
    run_dir = tmp_path / "run"
    process = start("train", *task(run_dir), "--num-rollout", num_rollouts, *placement, warm=True, **warm_workers)
    wait_until(lambda: len(metrics(run_dir)) >= 2 or process.poll() is not None, "two steps are recorded", timeout_s=400)
    family = descendants(process.pid)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert sum("sglang.launch_server" in command and command.startswith(f"{sglang_python()} ") for command in family.values()) == 2, family

    steps = metrics(run_dir)
    assert len(steps) == num_rollouts
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-3
    if num_rollouts > 3:
        rewards = [step["rollout/reward_mean"] for step in steps]
        assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    wait_until(lambda: not alive(family), "all processes have ended", timeout_s=120)
