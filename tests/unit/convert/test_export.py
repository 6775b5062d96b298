"""Exports by --save-hf: complete, replacing an earlier export and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuligo.convert import export as module
from fuligo.convert.compare import compare
from fuligo.convert.export import export
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.errors import CheckpointError, FuligoError
from fuligo.trainer.ranks.world import World
from tests.fp8 import save_family


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a checkpoint of the torch trainer."""
    weights = tmp_path / "iter_0000020" / "hf"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (weights / "model-00000.safetensors").write_text("new")
    return weights.parent


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


NEW = {"config.json": "{}", "model-00000.safetensors": "new"}


def test_nothing_of_an_earlier_export_stays(checkpoint: Path, tmp_path: Path):
    """A stale `model.safetensors` would win over the new files when loading."""
    target = tmp_path / "exports" / "19"
    target.mkdir(parents=True)
    (target / "config.json").write_text("old")
    (target / "model.safetensors").write_text("old")
    export(checkpoint, target)
    assert contents(target) == NEW
    assert [path.name for path in target.parent.iterdir()] == ["19"]


def test_a_distributed_checkpoint_becomes_a_hugging_face_directory(tmp_path: Path):
    source, target = save_family(tmp_path / "source", "qwen3"), tmp_path / "exports" / "19"
    hf_to_dist(source, tmp_path / "dist", World())
    for _ in range(2):
        export(tmp_path / "dist" / "release", target)
        assert not [result for result in compare(source, target) if result.difference]
        assert [path.name for path in target.parent.iterdir()] == ["19"]


def test_it_may_be_new_or_empty(checkpoint: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        export(checkpoint, target)
        assert contents(target) == NEW


@pytest.mark.parametrize("name", ["file", "directory"])
def test_what_is_no_export_stays(name: str, checkpoint: Path, tmp_path: Path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="it is not a Hugging Face directory; give another directory"):
        export(checkpoint, tmp_path / name)
    assert (tmp_path / "directory" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_one_that_cannot_be_written_leaves_the_earlier_one(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device", str(directory))

    target = tmp_path / "exports" / "19"
    export(checkpoint, target)
    (target / "model-00000.safetensors").write_text("earlier")
    monkeypatch.setattr(module, "sync_tree", full)
    with pytest.raises(FuligoError, match=r"cannot write .*exports/19: No space left on device"):
        export(checkpoint, target)
    assert contents(target) == {**NEW, "model-00000.safetensors": "earlier"}
    assert [path.name for path in target.parent.iterdir()] == ["19"]
