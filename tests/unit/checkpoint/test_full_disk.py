"""Checkpoints on a full disk: the error names the file system, and the previous checkpoint still loads."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fuligo.checkpoint.location import resolve
from fuligo.checkpoint.state import RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.errors import CheckpointError, CheckpointWriteError
from fuligo.formats.shards import Shard, write_shards
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from tests import tiny
from tests.small_disk import SmallDisk


@pytest.mark.parametrize("beside_training", [False, True])
async def test_the_torch_trainers(beside_training: bool, small_disk: SmallDisk, state: Callable[[int], RunState], tmp_path: Path) -> None:
    model = tiny.save_checkpoint(tmp_path / "model")
    schedule = LearningRateSchedule(peak=1e-3, style="constant", warmup_steps=0, decay_steps=1)
    settings = TorchTrainerSettings(hf_checkpoint=model, initial_weights=model, optimizer=OptimizerSettings(schedule))
    store = CheckpointStore(small_disk.path / "checkpoints")

    async def save(trainer: LocalTrainer, iteration: int) -> None:
        if beside_training:
            await (await store.begin(iteration, trainer.begin_save, trainer.end_save, state(iteration)))
        else:
            await store.save(iteration, trainer.save, state(iteration))

    trainer = LocalTrainer(settings)
    await trainer.load()
    await save(trainer, 1)
    small_disk.fill()
    with pytest.raises(CheckpointWriteError) as error:
        await save(trainer, 2)
    await trainer.close()
    assert error.value.exit_code == 1
    assert f"cannot write checkpoint iter_0000002 to {store.directory}" in str(error.value)
    assert f"No space left on device (os error 28) (0 of 4 MiB are free on the file system {small_disk.path}" in str(error.value)
    assert "iter_0000001 is intact); free some space or use another directory with --save, then resume" in str(error.value)

    small_disk.enlarge(8 * 1024**2)
    latest = resolve(store.directory)
    assert latest is not None and latest.iteration == 1
    trainer = LocalTrainer(settings)
    await trainer.load()
    await trainer.restore(latest.directory)
    await save(trainer, 2)
    await trainer.close()
    latest = resolve(store.directory)
    assert latest is not None and latest.iteration == 2


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit file sizes to 20 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_files", [1, 2])
def test_distributed_ones(num_files: int, small_files, tmp_path: Path) -> None:
    """One file fails although the others, including the metadata, can be written; torch does not report errors of its threads."""
    weights = [Shard("small", (10,), (0,), torch.ones(10)), Shard("large", (100, 100), (0, 0), torch.ones(100, 100))]
    with pytest.raises(CheckpointError, match=f"{tmp_path}: rank 0 failed: .*File too large"):
        write_shards(tmp_path, weights[-num_files:], None)
