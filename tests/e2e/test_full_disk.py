"""A full disk ends a run with an error that names it; with room again, the run resumes."""

import pytest

from tests.e2e.command import fail, succeed
from tests.e2e.conftest import Job
from tests.e2e.records import json_lines, metrics, sample_rows
from tests.small_disk import SmallDisk


def test_a_run_resumes_from_the_last_complete_checkpoint(job: Job, small_disk: SmallDisk) -> None:
    """The run directory is on the small disk; a checkpoint takes 1.5 MiB and is written while training continues."""
    run_dir = small_disk.path / "run"
    command = job(num_rollout=5, save_interval=1, async_save=True, run_dir=run_dir, load=run_dir / "checkpoints")
    error = fail(1, *command)
    assert "cannot write checkpoint iter_0000003" in error
    assert f"of 4 MiB are free on the file system {small_disk.path}; iter_0000002 is intact); free some space" in error

    small_disk.enlarge(16 * 1024**2)
    succeed(*command)
    assert [record["step"] for record in metrics(run_dir)] == list(range(5))


@pytest.mark.slow
def test_what_cannot_be_recorded_ends_the_run(job: Job, small_disk: SmallDisk) -> None:
    """The disk fills up in rollout 1; records of earlier rollouts stay intact."""
    run_dir = small_disk.path / "run"
    error = fail(1, *job(rm_type=None, custom_rm_path="tests.e2e.rewards.fills_the_disk", use_tensorboard=True, run_dir=run_dir))
    assert f"(0 of 4 MiB are free on the file system {small_disk.path}); earlier records are intact; free some space, then resume" in error
    assert [record["step"] for record in json_lines(run_dir / "metrics.jsonl")] == [0]
    assert {row["step"] for row in sample_rows(run_dir, "index")} == {0}
