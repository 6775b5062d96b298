"""Exports by --save-hf: complete, replacing an earlier export and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fuligo.convert import dist_to_hf
from fuligo.convert.compare import compare
from fuligo.convert.export import export
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.errors import CheckpointError, FuligoError
from fuligo.formats.checkpoint_files import record_dtypes
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.tensor_files import write_tensors
from tests import tiny
from tests.fp8 import save_family


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a checkpoint of the torch trainer."""
    weights = tmp_path / "iter_0000020" / "hf"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text('{"dtype": "float32"}')
    (weights / "tensors.json").write_text('{"a": "BF16", "b": "BF16", "bias": "F32"}')
    save_file({"a": torch.full((2, 3), 1 / 3), "b": torch.ones(2), "bias": torch.full((2,), 1 / 3)}, weights / "model.safetensors")
    return weights.parent


def check_is_new(directory: Path) -> None:
    """Check that the directory holds only the export, in the dtypes of the model that training started from."""
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert json.loads((directory / "config.json").read_text()) == {"dtype": "bfloat16"}
    tensors = load_file(directory / "model-00001-of-00001.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"a": torch.bfloat16, "b": torch.bfloat16, "bias": torch.float32}
    assert torch.equal(tensors["a"], torch.full((2, 3), 1 / 3).bfloat16()) and torch.equal(tensors["bias"], torch.full((2,), 1 / 3))


def test_nothing_of_an_earlier_export_stays(checkpoint: Path, tmp_path: Path):
    """A stale `model.safetensors` would win over the new files when loading."""
    target = tmp_path / "exports" / "19"
    target.mkdir(parents=True)
    (target / "config.json").write_text("old")
    (target / "model.safetensors").write_text("old")
    export(checkpoint, target)
    check_is_new(target)
    assert [path.name for path in target.parent.iterdir()] == ["19"]


def test_a_distributed_checkpoint_becomes_a_hugging_face_directory(tmp_path: Path):
    source, target = save_family(tmp_path / "source", "qwen3"), tmp_path / "exports" / "19"
    hf_to_dist(source, tmp_path / "dist", World())
    for _ in range(2):
        export(tmp_path / "dist" / "release", target)
        assert not [result for result in compare(source, target) if result.difference]
        assert [path.name for path in target.parent.iterdir()] == ["19"]


@pytest.mark.parametrize("family", ["qwen3_moe", "kimi_k2", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "qwen3"])
def test_experts_are_stored_as_published_files_have_them(family: str, tmp_path: Path):
    """transformers writes the names and shapes of published files, and the torch trainer those of transformers' model."""
    published = tiny.save_checkpoint(tmp_path / "published", family)
    weights = tmp_path / "iter_0000020" / "hf"
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    write_tensors(weights, model.state_dict().items())
    shutil.copy(published / "config.json", weights)
    record_dtypes(published, weights)
    export(weights.parent, tmp_path / "exported")
    expected, found = (read(tmp_path / name) for name in ("published", "exported"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def read(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_it_may_be_new_or_empty(checkpoint: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        export(checkpoint, target)
        check_is_new(target)


@pytest.mark.parametrize("name", ["file", "directory"])
def test_what_is_no_export_stays(name: str, checkpoint: Path, tmp_path: Path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="it is not a Hugging Face directory; use another directory"):
        export(checkpoint, tmp_path / name)
    assert (tmp_path / "directory" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_one_that_cannot_be_written_leaves_the_earlier_one(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device", str(directory))

    target = tmp_path / "exports" / "19"
    export(checkpoint, target)
    (target / "earlier.safetensors").touch()
    monkeypatch.setattr(dist_to_hf, "sync_tree", full)
    with pytest.raises(FuligoError, match=r"cannot write .*19: .*No space left on device"):
        export(checkpoint, target)
    assert (target / "earlier.safetensors").exists()
    assert [path.name for path in target.parent.iterdir()] == ["19"]
