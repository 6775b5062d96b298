"""Whole runs on SGLang engines: the quickstart's task until the reward rises, while an engine dies."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.command import environment
from tests.e2e.processes import descendants
from tests.e2e.warm_children import ForkServer
from tests.sglang.engines import ENVIRONMENT, sglang_python

ASSETS = Path(str(files("fuligo.quickstart"))) / "assets"
NUM_GROUPS = 12


def command(run_dir: Path, **changes: object) -> list[str]:
    """Return the quickstart's task with two engines behind a router and checked weight syncs."""
    flags: dict[str, object] = {
        "config": ASSETS / "config.yaml",
        "hf_checkpoint": ASSETS / "model",
        "prompt_data": ASSETS / "train.jsonl",
        "eval_prompt_data": f"{ASSETS / 'test.jsonl'}@[:2]",
        "skip_eval_before_train": True,
        "run_dir": run_dir,
        "rollout_backend": "sglang",
        "rollout_num_gpus": 2,
        "actor_num_gpus_per_node": 1,
        "engine_python": sglang_python(),
        "engine_env": json.dumps(ENVIRONMENT),
        "check_weight_update_equal": True,
        "router_policy": "round_robin",
        "progress": "plain",
        **changes,
    }
    parts = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items()]
    words = [word for option, value in parts for word in ([option] if value is True else [option, str(value)])]
    return [sys.executable, "-m", "fuligo", "train", *words]


@pytest.fixture
def start(warm_commands: ForkServer, tmp_path: Path) -> Iterator[object]:
    running: list[subprocess.Popen[str]] = []

    def launch(**changes: object) -> subprocess.Popen[str]:
        with warm_commands.serving():
            process = subprocess.Popen(
                command(tmp_path / "run", **changes),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        running.append(process)
        return process

    yield launch
    for process in running:
        process.kill()
        process.communicate()


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def servers_below(pid: int) -> dict[int, str]:
    """Return the command lines of the SGLang servers that a run started, without their guards."""
    found = descendants(pid).items()
    return {pid: command for pid, command in found if "sglang.launch_server" in command and "engines/guard.py" not in command}


def test_the_reward_rises_and_an_engine_that_dies_comes_back(start, tmp_path: Path) -> None:
    """Dynamic sampling and partial rollout keep the engines busy when one of them is killed."""
    run = start(
        num_rollout=5,
        lr=2e-4,
        rollout_batch_size=NUM_GROUPS,
        use_fault_tolerance=True,
        update_weight_mode="delta",
        over_sampling_batch_size=NUM_GROUPS + 4,
        dynamic_sampling_filter_path="fuligo.rollout.filters.check_reward_nonzero_std",
        partial_rollout=True,
    )
    lines: list[str] = []
    for line in run.stdout:
        lines.append(line)
        if re.match("step 2/", line):
            pid, command = next(iter(servers_below(run.pid).items()))
            os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, "".join(lines)
    port = re.search(r"--port[ =](\d+)", command)[1]
    assert any(f":{port}) died; " in line and "restarting it" in line for line in lines), "".join(lines)

    steps = metrics(tmp_path / "run")
    assert len(steps) == 5
    rewards = [step["rollout/reward_mean"] for step in steps]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2
    assert all(step["rollout/num_groups_kept"] == NUM_GROUPS and step["rollout/num_failed"] == 0 for step in steps)
    assert sum(step["rollout/num_resumed"] for step in steps) > 0
    # Engine and trainer agree on log-probabilities.
    on_policy = [step["train/logprob_abs_diff"] for step in steps if step["rollout/num_resumed"] == 0]
    assert on_policy and max(on_policy) < 1e-3

    samples = pq.read_table(tmp_path / "run" / "samples" / "rollout_000003.parquet").to_pylist()
    kept = [sample for sample in samples if sample["kept"]]
    assert len(kept) == 8 * NUM_GROUPS
    assert all(len(sample["versions"]) == len(sample["response_ids"]) for sample in samples)
    assert {version for sample in kept for version in sample["versions"]} <= {0, 1, 2, 3}
    first = pq.read_table(tmp_path / "run" / "samples" / "rollout_000000.parquet")
    assert set(first["engine"].to_pylist()) == {0, 1}, "the answering engine is known, although the router does not report it"


@pytest.mark.slow
def test_without_fault_tolerance_the_run_ends_and_names_the_engine(start, tmp_path: Path) -> None:
    """make test covers its halves: the fleet's error (test_turns.py) and the end of the run (tests/e2e/test_failures.py)."""
    run = start(num_rollout=8, save_interval=1)
    for line in run.stdout:
        if re.match("step 2/", line):
            os.kill(next(iter(servers_below(run.pid))), signal.SIGKILL)
            break
    rest = run.stdout.read()
    assert run.wait() == 1, rest
    assert re.search(r"engine 0 was killed", rest), rest
    assert "Traceback" not in rest.partition("its log")[0]
    assert (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
