"""Background saves: one at a time, complete before the run ends; a failed save fails the run."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from fuligo.checkpoint.state import RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.errors import CheckpointError, FuligoError
from fuligo.formats.checkpoint_files import TRACKER
from fuligo.job.periodic import SaveCheckpoint, Schedule
from fuligo.job.recorder import RunRecorder
from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.trainer.protocol import Trainer
from tests.small_disk import SmallDisk


class SlowTrainer:
    """Trainer that writes when the test allows it."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.error: Exception | None = None
        self.num_begun = 0

    async def begin_save(self, directory: Path) -> None:
        self.num_begun += 1
        (directory / "hf").mkdir()
        (directory / "hf" / "config.json").write_text(f'{{"number": {self.num_begun}}}')
        save_file({"weight": torch.ones(2)}, directory / "hf" / "model.safetensors")

    async def save(self, directory: Path) -> None:
        await self.begin_save(directory)

    async def end_save(self) -> None:
        await self.may_write.wait()
        if self.error is not None:
            raise self.error


class NoRecorder:
    def phase(self, name: str, step: int) -> Any:
        import contextlib

        return contextlib.nullcontext()


@pytest.fixture
def trainer() -> SlowTrainer:
    return SlowTrainer()


@pytest.fixture
def saves(tmp_path: Path, trainer: SlowTrainer) -> SaveCheckpoint:
    """Every second of six rollouts."""
    store, recorder = CheckpointStore(tmp_path / "checkpoints"), cast(RunRecorder, NoRecorder())
    export = str(tmp_path / "export" / "{rollout_id}")
    return SaveCheckpoint(store, cast(Trainer, trainer), Schedule(2, 6), recorder, "config: true", export, in_background=True)


def rollout(step: int) -> Rollout:
    return Rollout(step, [], RolloutState({"offset": step}), {})


def saved(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("iter_"))


@pytest.mark.parametrize(
    ("interval", "includes_last", "expected"), [(2, True, [1, 3, 4]), (2, False, [1, 3]), (None, True, [4]), (None, False, [])]
)
def test_the_last_of_five_rollouts_is_due_unless_it_is_left_out(interval: int | None, includes_last: bool, expected: list[int]) -> None:
    schedule = Schedule(interval, 5, includes_last=includes_last)
    assert [step for step in range(5) if schedule.due(step)] == expected


async def test_the_run_continues_while_a_checkpoint_is_written(tmp_path: Path, saves: SaveCheckpoint, trainer: SlowTrainer) -> None:
    await saves.run(rollout(1), version=1)
    assert saved(tmp_path) == [] and not saves.due(2)
    next_one = asyncio.create_task(saves.run(rollout(3), version=3))
    await asyncio.sleep(0.01)
    assert trainer.num_begun == 1, "the next save waits for the one before"
    trainer.may_write.set()
    await next_one
    assert trainer.num_begun == 2 and saved(tmp_path)[0] == "iter_0000002"
    await saves.finish()
    assert saved(tmp_path) == ["iter_0000002", "iter_0000004"]
    assert (tmp_path / "checkpoints" / TRACKER).read_text() == "4"
    assert json.loads((tmp_path / "export" / "3" / "config.json").read_text())["number"] == 2


async def test_a_failure_is_the_runs_at_the_next_rollout(tmp_path: Path, saves: SaveCheckpoint, trainer: SlowTrainer) -> None:
    trainer.error = OSError("No space left on device")
    trainer.may_write.set()
    await saves.run(rollout(1), version=1)
    assert saves._saving is not None
    await asyncio.wait([saves._saving])
    assert saves.due(2)
    with pytest.raises(CheckpointError, match="No space left on device"):
        await saves.run(rollout(2), version=2)
    assert saved(tmp_path) == []


async def test_an_export_that_does_not_fit_is_named(
    tmp_path: Path, saves: SaveCheckpoint, trainer: SlowTrainer, small_disk: SmallDisk
) -> None:
    """The checkpoint itself is elsewhere and complete."""
    saves.export_to = str(small_disk.path / "export")
    small_disk.fill()
    trainer.may_write.set()
    await saves.run(rollout(1), version=1)
    with pytest.raises(FuligoError, match=r"cannot write .*export: .*No space left on device.* \(0 of 4 MiB are free"):
        await saves.finish()
    assert saved(tmp_path) == ["iter_0000002"]


async def test_a_run_that_ends_early_leaves_no_half_of_a_checkpoint(tmp_path: Path, saves: SaveCheckpoint) -> None:
    await saves.run(rollout(1), version=1)
    await saves.abandon()
    assert list((tmp_path / "checkpoints").iterdir()) == []


async def test_the_last_rollout_can_be_saved_between_scheduled_checkpoints(
    tmp_path: Path, saves: SaveCheckpoint, trainer: SlowTrainer
) -> None:
    """Its state stays as it was, though sampling goes on; a scheduled checkpoint is not saved again."""
    saves.keeps_last = True
    trainer.may_write.set()
    last = rollout(2)
    await saves.run(rollout(1), version=2)
    await saves.save_last()
    assert saved(tmp_path) == ["iter_0000002"] and trainer.num_begun == 1
    assert saves.due(2)
    await saves.run(last, version=3)
    last.state.source["offset"] = 99
    await saves.save_last()
    assert saved(tmp_path) == ["iter_0000002", "iter_0000003"]
    state = RunState.read(tmp_path / "checkpoints" / "iter_0000003")
    assert (state.step, state.policy_version, state.rollout.source) == (3, 3, {"offset": 2})


async def test_the_last_state_is_saved_once_and_as_it_was(tmp_path: Path, saves: SaveCheckpoint, trainer: SlowTrainer) -> None:
    """Rollouts 0 and 2 are not scheduled; after rollout 1 its write in the background is finished."""
    saves.keeps_last = True
    trainer.may_write.set()
    assert not saves.has_unsaved
    given = rollout(0)
    await saves.run(given, version=1)
    given.state.source["offset"] = 99
    assert saves.due(0) and saves.has_unsaved
    await saves.save_last()
    assert not saves.has_unsaved and saved(tmp_path) == ["iter_0000001"]
    state = json.loads((tmp_path / "checkpoints" / "iter_0000001" / "state.json").read_text())
    assert state["step"] == 1 and state["source"] == {"offset": 0}

    await saves.run(rollout(1), version=2)
    assert saves.has_unsaved
    await saves.save_last()
    assert not saves.has_unsaved and saved(tmp_path)[-1] == "iter_0000002" and trainer.num_begun == 2
