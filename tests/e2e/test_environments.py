"""Runs in an environment that are interrupted: killed, and by partial or asynchronous rollouts."""

import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.command import fail, fuligo, succeed
from tests.e2e.conftest import Job
from tests.e2e.records import metrics, sample_rows

COLUMNS = (
    "index",
    "kept",
    "response_ids",
    "loss_mask",
    "engine_logprobs",
    "trainer_logprobs",
    "versions",
    "status",
    "reward",
)

LONG = {"LONG_STEP_S": "1.0"}
"""Environment in which some episodes outlast a rollout."""
BRIEF = {"rollout_stop_token_ids": [*range(7, 39)]}
"""Flags with which most turns end after a dozen tokens: a twelfth of the vocabulary stops a turn."""


def command(job: Job, run_dir: Path, kind: str, **flags: object) -> list[str]:
    settings: dict[str, object] = {
        "environment": f"tests.e2e.worlds.{kind}",
        "rm_type": None,
        "rollout_max_response_len": 200,
        "rollout_batch_size": 3,
        "save_interval": 1,
        "run_dir": run_dir,
        "load": run_dir / "checkpoints",
    }
    return job(**{**settings, **flags})


@pytest.mark.parametrize("kind", ["Resumable", pytest.param("Anew", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mode",
    [
        # test_no_loss.py carries partial samples over a kill; an episode then continues as here.
        pytest.param({"partial_rollout": True, "over_sampling_batch_size": 6}, marks=pytest.mark.slow),
        {"async_mode": "full", "max_staleness": 2},
    ],
    ids=["partial", "full"],
)
def test_interrupted_episodes_are_trained_as_they_were_sampled(mode: dict[str, object], kind: str, job: Job, tmp_path: Path) -> None:
    """Killed once as well; what continues, or begins anew, has the turns of one episode, and the trainer sees what the engine saw."""
    # From the fourth rollout on, some episodes outlast an update.
    flags = command(job, tmp_path, kind, **mode, no_skip_zero_advantages=True, num_rollout=6)
    assert fuligo(*flags, KILL_AT="step:1", **LONG).returncode == -signal.SIGKILL
    succeed(*flags, **LONG)
    records = metrics(tmp_path)
    assert len(records) == 6 and all(record["rollout/num_failed"] == 0 for record in records)
    rows = [row for row in sample_rows(tmp_path, *COLUMNS) if row["kept"]]
    turns: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        mask, versions = np.array(row["loss_mask"]), np.array(row["versions"])
        turns[row["index"]] += [len(run) for run in np.split(mask, np.flatnonzero(np.diff(mask)) + 1) if len(run) and run[0]]
        current = (mask == 1) & (versions == row["step"])
        np.testing.assert_allclose(np.array(row["trainer_logprobs"])[current], np.array(row["engine_logprobs"])[current], atol=1e-4)
    last = {row["index"]: row for row in rows}
    for index, lengths in turns.items():
        assert len(lengths) == 4 or last[index]["status"] == "truncated"
        assert last[index]["reward"] == sum(length % 3 for length in lengths)
    if kind == "Resumable":
        assert any(len(set(row["versions"])) > 1 for row in rows), "an interruption within an episode"


@pytest.mark.parametrize(
    "mode",
    [{}, pytest.param({"async_mode": "one-step"}, marks=pytest.mark.slow)],  # sync repeats the same resume, at the cost of three runs
    ids=["sync", "one-step"],
)
def test_a_killed_run_repeats_the_episodes_of_its_rollout(mode: dict[str, object], job: Job, tmp_path: Path) -> None:
    """Killed while episodes are in flight; in both modes the resumed run samples what an undisturbed one samples."""
    undisturbed, killed = (command(job, tmp_path / name, "Resumable", **mode, **BRIEF, num_rollout=2) for name in ("undisturbed", "killed"))
    succeed(*undisturbed)
    assert fuligo(*killed, KILL_AT="step:1").returncode == -signal.SIGKILL
    succeed(*killed)
    assert len(metrics(tmp_path / "killed")) == 2
    expected, rows = (sample_rows(tmp_path / name, *COLUMNS) for name in ("undisturbed", "killed"))
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        for name in ("step", "index", "response_ids", "loss_mask", "versions", "status", "reward"):
            assert row[name] == other[name], (name, row["step"], row["index"])
        np.testing.assert_allclose(row["engine_logprobs"], other["engine_logprobs"], atol=1e-4)


@pytest.mark.parametrize("played", ["environment", pytest.param("agent", marks=pytest.mark.slow)])  # the same loss below the gateway
def test_an_engine_that_dies_under_episodes_ends_the_run_which_resumes(played: str, job: Job, tmp_path: Path) -> None:
    """The run names the engine; started again, it plays the episodes that were in flight anew and loses none."""
    kinds = {"environment": "tests.e2e.worlds.LosesEngine", "agent": "tests.e2e.agents.loses_engine"}
    flags = command(job, tmp_path, "Resumable", **{"environment": None, played: kinds[played]}, **BRIEF, num_rollout=2)
    error = fail(1, *flags, KILL_AT="engine:1")
    assert "engine http://127.0.0.1:" in error and "was killed (out of memory" in error
    assert [record["step"] for record in metrics(tmp_path)] == [0]
    succeed(*flags)
    assert [record["step"] for record in metrics(tmp_path)] == [0, 1]
    rows = sample_rows(tmp_path, *COLUMNS)
    assert {row["status"] for row in rows} <= {"completed", "truncated"}
    assert {index for row in rows if (index := row["index"]) is not None} == set(range(24))
