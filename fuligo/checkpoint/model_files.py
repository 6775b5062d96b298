"""The files beside the weights of a Hugging Face directory, which a distributed checkpoint carries along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fuligo.config.hugging_face import DamagedFileError, read_stored_tensors
from fuligo.errors import CheckpointError

MODEL_FILES = "model"
"""Directory in a distributed checkpoint."""
TENSORS = "tensors.json"
"""Name -> type (as safetensors writes it) of every tensor of the directory that the files were copied from."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def copy_model_files(source: Path, target: Path) -> None:
    """Copy config.json, tokenizer and the like from a Hugging Face directory; of the weights, note names and types.

    Args:
        source: may itself have been made so.

    Raises:
        CheckpointError: its weights are damaged.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in other_files(source):
        shutil.copy(file, target)
    if not (source / TENSORS).exists() and any(source.glob("*.safetensors")):
        try:
            tensors = {name: tensor.dtype for name, tensor in read_stored_tensors(source).items()}
        except DamagedFileError as error:
            raise CheckpointError(str(error)) from None
        (target / TENSORS).write_text(json.dumps(tensors, indent=0))


def other_files(directory: Path) -> list[Path]:
    """All files of a Hugging Face directory but the weights and their index."""
    return [
        file
        for file in sorted(directory.iterdir())
        if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")
    ]
