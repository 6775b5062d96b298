"""`fuligo eval` gives bit for bit what the run that wrote the checkpoint found."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.command import REPOSITORY, fail, succeed
from tests.e2e.records import evaluations, json_lines

ASSETS = REPOSITORY / "fuligo" / "quickstart" / "assets"
MODEL = ASSETS / "model"
HELD_OUT = ["--eval-prompt-data", "sums", f"{ASSETS / 'test.jsonl'}@[:16]", "hard", f"{ASSETS / 'test.jsonl'}@[8:16]"]
TASK = ["--config", ASSETS / "config.yaml", "--hf-checkpoint", MODEL, *HELD_OUT]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two rollouts, each followed by an evaluation and a checkpoint; return the run directory."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    intervals = ["--num-rollout", 2, "--rollout-batch-size", 8, "--eval-interval", 1, "--save-interval", 1]
    succeed("train", *TASK, *intervals, "--prompt-data", ASSETS / "train.jsonl", "--run-dir", run_dir, "--progress", "plain")
    return run_dir


def answers(directory: Path, num_rollouts: int) -> list[dict]:
    columns = ["dataset", "index", "response_ids", "engine_logprobs", "reward"]
    return pq.read_table(directory / "eval" / f"eval_{num_rollouts:06d}.parquet", columns=columns).to_pylist()


# the tests below evaluate the initial model and the newest checkpoint
@pytest.mark.parametrize("num_rollouts", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_is_the_evaluation_of_the_run(num_rollouts: int, run_dir: Path, tmp_path: Path) -> None:
    """With the initial model, an earlier checkpoint and the newest one."""
    weights = {0: [], 1: ["--load", run_dir / "checkpoints", "--ckpt-step", 1], 2: ["--load", run_dir / "checkpoints"]}[num_rollouts]
    shown = succeed("eval", *TASK, *weights, "--run-dir", tmp_path / "eval")
    found = evaluations(tmp_path / "eval")
    assert found == [evaluations(run_dir)[num_rollouts]]
    assert answers(tmp_path / "eval", num_rollouts) == answers(run_dir, num_rollouts)
    rows = [line.split() for line in shown.splitlines()]
    assert ["sums", "mean@2", f"{found[0]['eval/sums/mean@2']:.4g}"] in rows
    assert ["hard", "pass@2", f"{found[0]['eval/hard/pass@2']:.4g}"] in rows


def test_the_configuration_of_a_run_evaluates_its_checkpoints(run_dir: Path, tmp_path: Path) -> None:
    """The run directory stays as it was."""
    before = sorted(run_dir.rglob("*"))
    succeed("eval", "--config", run_dir / "config.yaml", "--load", run_dir / "checkpoints", "--run-dir", tmp_path / "eval")
    assert evaluations(tmp_path / "eval") == evaluations(run_dir)[2:]
    assert answers(tmp_path / "eval", 2) == answers(run_dir, 2)
    said = fail(2, "eval", "--config", run_dir / "config.yaml", "--load", run_dir / "checkpoints", "--run-dir", run_dir)
    assert f"--run-dir {run_dir} already has recorded steps" in said
    assert sorted(run_dir.rglob("*")) == before


def test_trackers_and_the_log_function_get_the_metrics(run_dir: Path, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks.py"
    hooks.write_text(
        "import json\n\n\n"
        "def log(rollout_id, args, data, metrics):\n    metrics['eval/sums/num_rewards'] = len(data['sums']['rewards'])\n\n\n"
        "class Sink:\n"
        "    def __init__(self, args, run_dir):\n        self.file = open(run_dir / 'sink.jsonl', 'a')\n\n"
        "    def write(self, record):\n        self.file.write(json.dumps(record))\n\n"
        "    def close(self):\n        self.file.close()\n"
    )
    tracked = ["--sink-path", f"{hooks}:Sink", "--custom-eval-rollout-log-function-path", f"{hooks}:log"]
    succeed("eval", *TASK, "--load", run_dir / "checkpoints", "--run-dir", tmp_path / "eval", *tracked)
    record = json.loads((tmp_path / "eval" / "sink.jsonl").read_text())
    assert record.pop("time") > 0
    (written,) = json_lines(tmp_path / "eval" / "eval" / "metrics.jsonl")
    assert written == {"num_rollouts": record.pop("step"), **record}
    assert written == {**evaluations(run_dir)[2], "eval/sums/num_rewards": 32}


@pytest.mark.megatron
def test_a_distributed_checkpoint_is_evaluated(run_dir: Path, tmp_path: Path) -> None:
    """Weights for the engines are exported from it and removed afterwards."""
    succeed("convert", "hf-to-dist", "--hf-checkpoint", MODEL, "--save", tmp_path / "dist")
    succeed("eval", *TASK, "--load", tmp_path / "dist", "--run-dir", tmp_path / "eval")
    assert answers(tmp_path / "eval", 0) == answers(run_dir, 0)
    assert not list((tmp_path / "eval").rglob("*.safetensors"))
