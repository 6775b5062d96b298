"""On-policy distillation end to end, with the teacher in the trainer or served by an engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fuligo.engines.embedded.launch import EmbeddedEngineProcess, EmbeddedEngineSettings, launch_embedded
from tests import tiny
from tests.e2e.command import succeed
from tests.e2e.conftest import Job
from tests.e2e.records import metrics, sample_rows

DISTILLED = {"rm_type": None, "label_key": None, "use_opd": True, "lr": 5e-3, "rollout_max_response_len": 24}
"""Learn only from the teacher, without a reward."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a teacher whose shape differs from the student's."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("teacher"), seed=7, layers=1, hidden=32)


@pytest.fixture(scope="module")
def distilled(job: Job, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with the teacher in the trainer; return the run directory."""
    run_dir = tmp_path_factory.mktemp("distilled") / "run"
    succeed(*job(**DISTILLED, opd_teacher_load=teacher, num_rollout=20, run_dir=run_dir))
    return run_dir


@pytest.fixture
def served(teacher: Path, warm_children: None, tmp_path: Path) -> Iterator[EmbeddedEngineProcess]:
    settings = EmbeddedEngineSettings(str(teacher), tmp_path / "teacher.txt", device="cpu", num_threads=1)
    with asyncio.Runner() as runner:
        engine = runner.run(launch_embedded(settings))
        yield engine
        runner.run(engine.stop())


def test_the_reverse_kl_to_the_teacher_falls(distilled: Path) -> None:
    reverse_kl = [step["train/opd_reverse_kl"] for step in metrics(distilled)]
    assert np.mean(reverse_kl[-3:]) < 0.6 * np.mean(reverse_kl[:3])
    assert {step["rollout/reward_mean"] for step in metrics(distilled)} == {0.0}


def test_the_advantages_are_the_difference_of_the_two(distilled: Path) -> None:
    """There is no reward to add to them."""
    for row in sample_rows(distilled, "advantages", "trainer_logprobs", "teacher_logprobs"):
        np.testing.assert_allclose(row["advantages"], np.subtract(row["teacher_logprobs"], row["trainer_logprobs"]), atol=1e-5)


def test_a_served_teacher_says_the_same(job: Job, distilled: Path, served: EmbeddedEngineProcess, tmp_path: Path) -> None:
    """Its first rollout has the same samples as the other run."""
    run_dir = tmp_path / "run"
    succeed(*job(**DISTILLED, opd_teacher_url=served.url, num_rollout=1, run_dir=run_dir), **served.keys.environment)
    rows = sample_rows(run_dir, "response_ids", "teacher_logprobs", "spans")
    assert all("teacher" in [span["name"] for span in row["spans"]] for row in rows)
    for row, other in zip(rows, sample_rows(distilled, "response_ids", "teacher_logprobs"), strict=False):
        assert row["response_ids"] == other["response_ids"]
        np.testing.assert_allclose(row["teacher_logprobs"], other["teacher_logprobs"], atol=1e-4)
