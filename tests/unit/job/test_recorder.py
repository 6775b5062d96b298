"""Record of a rollout that ends the run."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from fuligo.config import Config
from fuligo.job.recorder import LogHooks, RunRecorder
from fuligo.observability.progress import Progress
from fuligo.observability.run_directory import RunDirectory
from fuligo.rollout.protocol import Rollout, RolloutState, UnfilledRolloutError
from fuligo.types import Sample, SampleGroup
from tests.small_disk import SmallDisk


def dropped_group() -> SampleGroup:
    return SampleGroup(0, 0, [Sample(0, 0, "p", np.ones(9, np.int32))], kept=False, drop_reason="zero_std")


def recorder_of(directory: RunDirectory) -> RunRecorder:
    return RunRecorder(directory, Progress(), [], LogHooks(), save_samples=True, reward_key=None, pass_key=None)


def test_samples_of_an_unfilled_rollout_are_written(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", Config(), resume=False)
    recorder_of(directory).record_unfilled(UnfilledRolloutError("dropped", 3, [dropped_group()]))
    table = pq.read_table(directory.samples / "rollout_000003.parquet")
    assert set(table["drop_reason"].to_pylist()) == {"zero_std"}
    directory.close()


def test_a_full_disk_does_not_replace_the_error_that_ends_the_run(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory.create(small_disk.path / "run", Config(), resume=False)
    small_disk.fill()
    recorder_of(directory).record_unfilled(UnfilledRolloutError("dropped", 3, [dropped_group()]))
    directory.close()
    (warning,) = caplog.messages
    assert warning.startswith("cannot write the samples of rollout 3, which was not filled: ")
    assert "No space left on device" in warning


def test_an_alarm_is_logged_once_when_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory.create(tmp_path / "run", Config(), resume=False)
    recorder = recorder_of(directory)
    for step in range(6):
        recorder.record(Rollout(step, [], RolloutState({}), {"rollout/reward_mean": 0.0}), None, None, 0)
    directory.close()
    (warning,) = [message for message in caplog.messages if message.startswith("alarm: ")]
    assert warning.startswith(
        "alarm: The reward is (almost) 0 since step 0 (rollout/reward_mean). The mean reward of these steps is at most 0,"
    )
