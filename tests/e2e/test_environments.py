"""Runs in an environment that are interrupted: killed, and by partial or asynchronous rollouts."""

import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.command import fuligo, succeed
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


def command(job: Job, run_dir: Path, kind: str, **flags: object) -> list[str]:
    settings: dict[str, object] = {
        "environment": f"tests.e2e.worlds.{kind}",
        "rm_type": None,
        "rollout_max_response_len": 120,
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
        {"partial_rollout": True, "over_sampling_batch_size": 6},
        {"async_mode": "full", "max_staleness": 2},
    ],
    ids=["partial", "full"],
)
def test_interrupted_episodes_are_trained_as_they_were_sampled(mode: dict[str, object], kind: str, job: Job, tmp_path: Path) -> None:
    """Killed once as well; what continues, or begins anew, has the turns of one episode, and the trainer sees what the engine saw."""
    flags = command(job, tmp_path, kind, **mode, num_rollout=6)  # of those that follow the first three, episodes outlast updates
    assert fuligo(*flags, KILL_AT="step:1").returncode == -signal.SIGKILL
    succeed(*flags)
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
