"""Conversion of a distributed checkpoint to a Hugging Face directory, one file of weights at a time."""

import json
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fuligo.convert.hf_view import HuggingFaceView
from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import TENSORS, UNFINISHED, drop_quantisation, other_files
from fuligo.formats.disk import free_space, sync, sync_tree

FILE_BYTES = 4 * 1024**3
NO_CHANGE: Mapping[str, object] = {}


class Weights(Protocol):
    """Tensors of the Hugging Face directory to write, created on demand."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, name: str) -> Tensor: ...


def dist_to_hf(source: Path, target: Path, *, model: Path | None = None, file_bytes: int = FILE_BYTES) -> None:
    """Write weights, config.json and tokenizer for transformers and engines. `target` appears when it is complete.

    Args:
        source: a distributed checkpoint.
        target: a new or empty directory.
        model: Hugging Face directory to take config.json and tokenizer from; None takes those in the checkpoint.
        file_bytes: size of a file of weights, and so of the memory needed; a larger tensor gets its own file.

    Raises:
        CheckpointError: the checkpoint is damaged, or the target cannot be written.
        ConfigError: the checkpoint's model is unknown.
    """
    view = HuggingFaceView(source, model)
    changed = {"tie_word_embeddings": False} if view.is_value_model else NO_CHANGE
    write_directory(view, view.model, target, changed=changed, file_bytes=file_bytes)


def write_directory(
    weights: Weights, model: Path, target: Path, *, changed: Mapping[str, object] = NO_CHANGE, file_bytes: int = FILE_BYTES
) -> None:
    """Write these weights and the other files of the directory `model` to `target`, which appears when it is complete.

    Args:
        target: a new or empty directory.
        changed: keys to change in config.json.
        file_bytes: see `dist_to_hf`.

    Raises:
        CheckpointError: the weights are damaged, or the target cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"cannot write {target}: it exists and is not an empty directory; use another directory")
    unfinished = target.with_name(f"{UNFINISHED}{target.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write_weights(weights, unfinished, file_bytes)
        for file in other_files(model):
            if file.name != TENSORS:
                shutil.copy(file, unfinished)
        config = drop_quantisation(unfinished / "config.json")
        if changed:
            (unfinished / "config.json").write_text(json.dumps({**config, **changed}, indent=2) + "\n")
        sync_tree(unfinished)
        unfinished.replace(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error} ({free_space(target)}); free some space or use another directory") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(weights: Weights, directory: Path, file_bytes: int) -> None:
    files = list(_cut(weights, file_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({name: weights.read(name).contiguous() for name in names}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(_num_bytes(weights, name) for name in weights.shapes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _num_bytes(weights: Weights, name: str) -> int:
    return prod(weights.shapes[name]) * weights.dtypes[name].itemsize


def _cut(weights: Weights, file_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in weights.shapes:
        if names and size + _num_bytes(weights, name) > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += _num_bytes(weights, name)
    yield names
