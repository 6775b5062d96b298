"""Metrics: records are flat and documented, and their keys show which depend on the clock."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fuligo
from fuligo.algorithms.off_policy import Correction
from fuligo.job.recorder import perf_metrics, step_record
from fuligo.observability.jsonl import JsonLines, read_json_lines
from fuligo.rollout.dynamic_sampling import DynamicSampling
from fuligo.rollout.metrics import RolloutCounts, sample_metrics, sampling_metrics
from fuligo.trainer.objective import KlLoss, LossInputs, LossSettings, objective
from fuligo.types import StepResult
from tests.metrics_page import METRICS, is_timing, undocumented

PACKAGE = Path(fuligo.__file__).parent
FIXED = [
    "rollout/reward_mean",
    "rollout/response_len_mean",
    "rollout/truncated_ratio",
    "rollout/zero_std_ratio",
    "rollout/tokens_per_s",
    "train/loss",
    "train/pg_loss",
    "train/kl",
    "train/entropy",
    "train/clip_fraction",
    "train/grad_norm",
    "train/logprob_abs_diff",
    "train/tokens_per_s",
    "perf/step_s",
    "perf/rollout_s",
    "perf/train_s",
    "perf/sync_s",
    "perf/idle_fraction",
    "step",
    "policy_version",
    "time",
]


def record(**durations: float) -> dict:
    rollout = {"rollout/reward_mean": np.float64(0.1), "rollout/tokens_per_s": 9.0, "rollout/num_groups_kept": 4}
    result = StepResult({"train/loss": np.float32(0.25), "train/tokens_per_s": 3.0}, {}, 10)  # type: ignore[dict-item]
    return step_record(3, 4, rollout, result, perf_metrics(durations, 2.0))


def test_names_that_tools_rely_on_are_documented() -> None:
    assert undocumented(FIXED) == []
    assert undocumented(["train/los", "rollout/dropped/zero_std", "eval/aime/pass@8", "eval/aime", "time_s"]) == [
        "train/los",
        "eval/aime",
        "time_s",
    ]


def test_the_page_marks_the_keys_that_depend_on_the_clock() -> None:
    assert len(METRICS) > 70
    assert [metric.key for metric in METRICS if metric.has_clock != is_timing(metric.key)] == []


def test_a_key_is_documented_once() -> None:
    assert len({metric.key for metric in METRICS}) == len(METRICS)


def source() -> str:
    """Return the source of every module that measures."""
    return "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "progress.py")


def test_every_key_named_in_the_source_is_documented() -> None:
    named = set(re.findall(r'"((?:rollout|train|perf|eval|engine)/[a-z_]+)"', source()))
    assert named and undocumented(sorted(named)) == []


def test_every_documented_key_is_measured_somewhere() -> None:
    names = {metric.key.rpartition("/")[2] for metric in METRICS if "<" not in metric.key.rpartition("/")[2]}
    measured = source()
    assert [name for name in sorted(names) if f'"{name}"' not in measured and f'/{name}"' not in measured] == []


def test_metrics_of_a_rollout_are_documented() -> None:
    sampling = DynamicSampling(1, 1, 1)
    sampling.submit([0])
    sampling.finish(0, "zero_std")
    reported = sample_metrics([], reward_key=None, policy_version=0) | sampling_metrics([], [], sampling, RolloutCounts(), None)
    assert "rollout/dropped/zero_std" in reported and undocumented(reported) == []


def test_metrics_of_the_loss_are_documented() -> None:
    tokens = torch.full((2,), -1.0)
    inputs = LossInputs(tokens, tokens, tokens, tokens + 2, tokens + 1.5, torch.zeros(2, dtype=torch.long), 1, tokens, tokens, tokens)
    settings = LossSettings(entropy_coef=0.1, kl_loss=KlLoss(0.1), correction=Correction(), opsm_delta=0.0)
    reported = [f"train/{name}" for name in objective(inputs, settings).sums.means()]
    assert len(reported) > 5 and undocumented(reported) == []


def test_a_record_is_flat_and_of_plain_numbers(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "metrics.jsonl")
    known = record(rollout=1.0, train=0.5)
    file.append(known)
    assert read_json_lines(file.path) == [known]
    assert {type(value) for value in known.values()} == {int, float}
    assert list(known)[:3] == ["step", "policy_version", "time"]
    assert undocumented(known) == []


@pytest.mark.parametrize("key", [metric.key for metric in METRICS if metric.unit in ("s", "tokens/s")])
def test_every_time_and_rate_counts_as_timing(key: str) -> None:
    assert is_timing(key)


def test_idle_fraction_is_the_share_in_which_the_trainer_waits() -> None:
    perf = perf_metrics({"rollout": 1.2, "score": 0.3, "train": 0.2, "sync": 0.1}, 2.0)
    assert perf == {
        "perf/step_s": 2.0,
        "perf/rollout_s": 1.2,
        "perf/score_s": 0.3,
        "perf/train_s": 0.2,
        "perf/sync_s": 0.1,
        "perf/idle_fraction": pytest.approx(0.75),
    }
    assert perf_metrics({"train": 2.1}, 2.0)["perf/idle_fraction"] == 0.0


def test_a_rollout_without_training_has_a_record() -> None:
    assert "train/loss" not in json.loads(json.dumps(step_record(0, 0, {"rollout/reward_mean": 1.0}, None, {})))
