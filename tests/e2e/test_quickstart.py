"""`fuligo quickstart`, and its task with other algorithms."""

import json
import re
from pathlib import Path

import pytest

from fuligo.cli.preflight import preflight_problems
from fuligo.cli.quickstart import ASSETS, _flags
from fuligo.config.command_line import parse
from fuligo.config.validate import validate
from tests.e2e.command import succeed
from tests.e2e.records import metrics

LAST_LINE = re.compile(r"reward (\d\.\d\d) -> (\d\.\d\d) in [\d.]+ s \((.*)\)")


@pytest.mark.parametrize(
    ("seed", "steps"), [(1, ["--num-rollout", 10]), *(pytest.param(seed, [], marks=pytest.mark.slow) for seed in (1, 2, 3, 4, 5))]
)
def test_a_tiny_model_learns_to_add(seed: int, steps: list[object], tmp_path: Path) -> None:
    """A third of the steps are enough to see it learn."""
    output = succeed("quickstart", "--seed", seed, *steps, "--run-dir", tmp_path / "run")
    found = LAST_LINE.fullmatch(output.rstrip("\n").splitlines()[-1])
    assert found, output
    start, end, run_dir = found.groups()
    assert float(start) <= 0.50
    assert float(end) >= 0.90
    assert run_dir == str(tmp_path / "run")
    assert f"report       {tmp_path / 'run' / 'report.html'}" in output
    assert "fuligo report</title>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_the_default_config_passes_all_checks_and_has_30_steps(tmp_path: Path) -> None:
    config = parse(_flags(tmp_path / "run", seed=1)).config
    validate(config)
    assert preflight_problems(config) == []
    assert config.data.num_rollout == 30


@pytest.mark.slow
def test_it_learns_by_ppo_too(tmp_path: Path) -> None:
    """One sample per prompt has no group as a baseline; the value model provides it."""
    paths = ["--hf-checkpoint", ASSETS / "model", "--prompt-data", ASSETS / "train.jsonl", "--run-dir", tmp_path / "run"]
    ppo = ["--advantage-estimator", "ppo", "--normalize-advantages", "--critic-lr", 1e-3, "--num-critic-only-steps", 2]
    sizes = ["--rollout-batch-size", 256, "--n-samples-per-prompt", 1, "--num-rollout", 10]
    evaluation = ["--eval-prompt-data", "held_out", f"{ASSETS / 'test.jsonl'}@[0:2]", "--skip-eval-before-train"]
    succeed("train", "--config", ASSETS / "config.yaml", *paths, *ppo, *sizes, *evaluation, "--progress", "plain")
    records = metrics(tmp_path / "run")
    assert records[0]["rollout/reward_mean"] <= 0.50
    assert records[-1]["rollout/reward_mean"] >= 0.80
    assert max(record["train/explained_variance"] for record in records) > 0.02


def test_an_adapter_learns_to_add(tmp_path: Path) -> None:
    """LoRA with ten times the learning rate; the engine applies the adapter, and every sync compares all weights."""
    paths = ["--hf-checkpoint", ASSETS / "model", "--prompt-data", ASSETS / "train.jsonl", "--run-dir", tmp_path / "run"]
    lora = ["--lora-rank", 16, "--lr", 1e-3, "--num-rollout", 3, "--check-weight-update-equal"]
    evaluation = ["--eval-prompt-data", "held_out", ASSETS / "test.jsonl", "--n-samples-per-eval-prompt", 1, "--skip-eval-before-train"]
    succeed("train", "--config", ASSETS / "config.yaml", *paths, *lora, *evaluation, "--progress", "plain")
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "eval" / "metrics.jsonl").read_text().splitlines()]
    assert evaluations[-1]["eval/held_out/mean@1"] >= 0.85
    adapter = tmp_path / "run" / "checkpoints" / "iter_0000003" / "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in adapter.iterdir()}
