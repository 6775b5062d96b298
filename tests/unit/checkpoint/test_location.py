"""Meaning of `--load` and `--ckpt-step` for every kind of directory."""

from pathlib import Path

import pytest

from fuligo.checkpoint.location import Checkpoint, WeightsOnly, resolve, value_weights_directory, weights_directory
from fuligo.checkpoint.store import CheckpointStore
from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import TRACKER, model_directory
from fuligo.formats.disk import write_manifest


@pytest.fixture
async def load(tmp_path: Path, state, weights) -> Path:
    """Save checkpoints after 10 and 20 rollouts."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for iteration in (10, 20):
        await store.save(iteration, weights(), state(iteration))
    return store.directory


def hugging_face(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


def test_nothing_to_load_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert resolve(None) is None
    assert resolve(tmp_path / "empty") is None
    assert resolve(tmp_path / "not there") is None


def test_leftovers_of_the_first_save_start_afresh(tmp_path: Path) -> None:
    (tmp_path / ".tmp_iter_0000010").mkdir()
    assert resolve(tmp_path) is None


def test_the_tracker_names_the_checkpoint(load: Path) -> None:
    assert resolve(load) == Checkpoint(load / "iter_0000020", 20)
    (load / TRACKER).write_text("10\n")
    assert resolve(load) == Checkpoint(load / "iter_0000010", 10)


def test_another_iteration_can_be_asked_for(load: Path) -> None:
    assert resolve(load, 10) == Checkpoint(load / "iter_0000010", 10)
    with pytest.raises(CheckpointError, match=r"cannot load iteration 15 from .*: it has 10, 20; choose one with --ckpt-step"):
        resolve(load, 15)


def test_an_iteration_is_asked_for_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--ckpt-step 5: --load is missing or empty: "):
        resolve(tmp_path, 5)
    with pytest.raises(CheckpointError, match="--ckpt-step 5: --load is not given"):
        resolve(None, 5)


def test_a_tracker_without_its_checkpoint_is_an_error(load: Path) -> None:
    (load / TRACKER).write_text("30")
    with pytest.raises(CheckpointError, match=r"cannot load iteration 30 from .*: it has 10, 20"):
        resolve(load)


def test_a_tracker_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("30")
    with pytest.raises(CheckpointError, match=r"cannot load iteration 30 from .*: it has no checkpoint; use another directory"):
        resolve(tmp_path)


def test_a_run_killed_before_it_wrote_its_first_tracker_resumes(tmp_path: Path, load: Path) -> None:
    (load / TRACKER).unlink()
    with pytest.raises(CheckpointError, match=f"has no {TRACKER}"):
        resolve(load)
    (load / "iter_0000010").rename(tmp_path / "elsewhere")
    assert resolve(load) == Checkpoint(load / "iter_0000020", 20)


def test_a_hugging_face_directory_gives_weights_only(tmp_path: Path) -> None:
    directory = hugging_face(tmp_path / "model")
    assert resolve(directory) == WeightsOnly(directory)


def test_a_release_gives_weights_only(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match="is not a Hugging Face directory"):
        resolve(tmp_path)
    directory = hugging_face(tmp_path / "release")
    assert resolve(tmp_path) == WeightsOnly(directory)


def distributed(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / ".metadata").touch()
    return directory


def test_a_distributed_checkpoint_gives_weights_only(tmp_path: Path) -> None:
    directory = distributed(tmp_path / "release")
    assert resolve(directory) == WeightsOnly(directory)
    (tmp_path / TRACKER).write_text("release\n")
    assert resolve(tmp_path) == WeightsOnly(directory)
    assert weights_directory(tmp_path) == weights_directory(directory) == directory
    assert model_directory(directory) == directory / "model"


def test_first_weights_are_those_of_the_newest_checkpoint(load: Path, tmp_path: Path) -> None:
    assert weights_directory(load) == load / "iter_0000020" / "hf"
    assert weights_directory(hugging_face(tmp_path / "model")) == model_directory(tmp_path / "model") == tmp_path / "model"
    (load / "iter_0000020" / "hf" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        weights_directory(load)


def test_first_values_are_those_of_the_newest_checkpoint_where_it_has_a_value_model(load: Path, tmp_path: Path) -> None:
    assert value_weights_directory(load) == load / "iter_0000020" / "hf"
    values = hugging_face(load / "iter_0000020" / "critic")
    assert value_weights_directory(load) == values
    assert value_weights_directory(values) == values
    assert value_weights_directory(hugging_face(tmp_path / "model")) == tmp_path / "model"


def test_first_values_of_the_megatron_trainers_checkpoint_are_inside_of_it(tmp_path: Path) -> None:
    iteration = distributed(tmp_path / "iter_0000003")
    distributed(iteration / "critic")
    write_manifest(iteration)
    (tmp_path / TRACKER).write_text("3")
    assert weights_directory(tmp_path) == iteration
    assert value_weights_directory(tmp_path) == iteration / "critic"


def test_anything_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="is not a Hugging Face directory"):
        resolve(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "notes.txt")
    (tmp_path / TRACKER).write_text("the last one")
    with pytest.raises(CheckpointError, match="holds 'the last one'"):
        resolve(tmp_path)


def test_the_error_for_a_wrong_directory_names_the_right_one(load: Path) -> None:
    with pytest.raises(CheckpointError, match=f"use --load {load}, which holds the checkpoints$"):
        resolve(load.parent)
    with pytest.raises(CheckpointError, match=f"it is a single checkpoint; use --load {load} --ckpt-step 20$"):
        resolve(load / "iter_0000020")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"model\.safetensors has 6 bytes, expected 7"),
        (lambda file: file.write_bytes(b"WEIGHTS"), r"model\.safetensors does not match its checksum"),
        (lambda file: file.unlink(), r"model\.safetensors is missing"),
    ],
)
def test_damage_is_noticed_and_the_file_named(load: Path, damage, message: str) -> None:
    damage(load / "iter_0000020" / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        resolve(load)
    assert resolve(load, 10) == Checkpoint(load / "iter_0000010", 10)


def test_a_checkpoint_of_another_program_is_refused(load: Path) -> None:
    (load / "iter_0000020" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json, so it is not a complete fuligo checkpoint"):
        resolve(load)
    (load / "iter_0000020" / "manifest.json").write_text('{"fil')
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json"):
        resolve(load)
