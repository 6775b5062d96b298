"""Distributed checkpoints of others whose files are pickles that run code: every command that opens one refuses it by name."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fuligo.cli import main
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.formats.disk import write_manifest
from fuligo.trainer.ranks.world import World
from tests import tiny
from tests.e2e.command import fail, train_command

pytestmark = pytest.mark.long


class RunsACommand:
    """Object whose unpickling makes a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.directory),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    hf_to_dist(model, directory, World())
    return directory


def poisoned_metadata(directory: Path, proof: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(RunsACommand(proof)))


def poisoned_tensors(directory: Path, proof: Path) -> None:
    """Put a pickle in the place of every tensor."""
    poison = io.BytesIO()
    torch.save(RunsACommand(proof), poison, _use_new_zipfile_serialization=False)
    for place in FileSystemReader(directory).read_metadata().storage_data.values():
        assert place.length > len(poison.getvalue())
        with (directory / place.relative_path).open("r+b") as file:
            file.seek(place.offset)
            file.write(poison.getvalue())


@pytest.mark.parametrize(
    ("command", "poison"),
    [
        *((command, poison) for command in ("dist-to-hf", "compare") for poison in (poisoned_metadata, poisoned_tensors)),
        ("train --load", poisoned_metadata),
        ("train --ref-load", poisoned_tensors),
        # one function reads both of these and both of those
        pytest.param("train --load", poisoned_tensors, marks=pytest.mark.slow),
        pytest.param("train --ref-load", poisoned_metadata, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_runs_code_is_refused_by_name(
    command: str, poison: Callable[[Path, Path], None], model: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "dist"))
    proof = tmp_path / "executed"
    poison(directory / "release", proof)
    write_manifest(directory / "release")  # its checksums are not signatures
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1", "label": "2"}\n' * 8)
    train = {"run_dir": tmp_path / "run", "train_backend": "megatron", "rollout_backend": "embedded", "num_rollout": 1}
    convert = {
        "dist-to-hf": ["convert", "dist-to-hf", directory, "--save", tmp_path / "hf"],
        "compare": ["convert", "compare", model, directory],
    }
    if command in convert:
        assert main([str(part) for part in convert[command]]) == 2
        errors = " ".join(capfd.readouterr().err.split())
    else:  # in a separate process, since Megatron has one world per process
        changes = {"load": directory} if command == "train --load" else {"ref_load": directory, "use_kl_loss": True, "kl_loss_coef": 0.1}
        errors = fail(2, *train_command(model, prompts, **train, **changes))
    file = directory / "release" / (".metadata" if poison is poisoned_metadata else "__0_")
    assert str(file) in errors, errors
    assert "posix.mkdir is not allowed" in errors, errors
    assert "Traceback" not in errors
    assert not proof.exists()
