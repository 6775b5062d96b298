"""The calculator example: a model in an environment with a tool."""

from pathlib import Path
from typing import Any

from tests.e2e.command import succeed
from tests.e2e.records import metrics

CONFIG = Path(__file__).parents[2] / "examples" / "calculator" / "config.yaml"


def run(run_dir: Path, *arguments: Any) -> list[dict[str, Any]]:
    succeed("train", "--config", CONFIG, "--no-eval", "--run-dir", run_dir, *arguments)
    return metrics(run_dir)


def test_the_model_learns_to_use_its_tool(tmp_path: Path) -> None:
    first, *_, last = run(tmp_path / "run", "--num-rollout", 4, "--environment-isolation", "process")
    assert last["rollout/reward_mean"] > 0.8 > first["rollout/reward_mean"]
    assert last["rollout/sample/calls/calculator"] >= 1 and last["rollout/sample/turns"] > first["rollout/sample/turns"]


def test_without_its_tool_it_cannot_compute(tmp_path: Path) -> None:
    (only,) = run(tmp_path / "run", "--num-rollout", 1, "--environment-settings", '{"tool": false}', "--environment-isolation", "none")
    assert only["rollout/reward_mean"] < 0.1
