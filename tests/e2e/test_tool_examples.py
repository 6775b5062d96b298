"""The search and code examples: a model that has been shown a tool learns to use it."""

from pathlib import Path

import pytest

from fuligo.environments.tools.python import PythonSettings, check_sandbox
from fuligo.errors import ConfigError
from tests.e2e.command import succeed
from tests.e2e.records import metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


def rewards(example: str, run_dir: Path, *flags: object) -> list[float]:
    """Train and return the mean reward of every rollout."""
    succeed("train", "--config", EXAMPLES / example / "config.yaml", "--no-eval", "--run-dir", run_dir, *flags)
    return [record["rollout/reward_mean"] for record in metrics(run_dir)]


@pytest.mark.slow  # the test below and test_calculator.py train with tools, too
def test_the_model_learns_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, *_, last = rewards("search", tmp_path / "run", "--num-rollout", 5, "--rollout-batch-size", 8)
    assert first < 0.3 and last > 0.5


def test_the_model_learns_to_write_programs(tmp_path: Path) -> None:
    try:
        check_sandbox(PythonSettings())
    except ConfigError as problem:
        pytest.skip(str(problem))
    first, *_, last = rewards("code", tmp_path / "run", "--num-rollout", 6, "--rollout-batch-size", 8)
    assert first < 0.3 and last > 0.4
