"""Conversion of a distributed checkpoint or a value model to a Hugging Face directory, one file of weights at a time."""

import json
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fuligo.checkpoint.location import saved_value_model, training_checkpoint, weights_directory, weights_of
from fuligo.convert.hf_view import HuggingFaceView
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.checkpoint_files import UNFINISHED, drop_quantization, is_distributed, other_files
from fuligo.formats.disk import default_mode, free_space, sync, sync_tree
from fuligo.formats.hf_tensors import HuggingFaceTensors
from fuligo.formats.hugging_face import TENSORS, read_config_json

FILE_BYTES = 4 * 1024**3
"""Largest size of a file of weights, which is held in memory; a larger tensor gets a separate file."""
NO_CHANGE: Mapping[str, object] = {}


class Weights(Protocol):
    """Tensors of the Hugging Face directory to write, created on demand."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, name: str) -> Tensor: ...


def dist_to_hf(source: Path, target: Path, *, model: Path | None = None) -> None:
    """Convert a distributed checkpoint to a Hugging Face directory `target`, new or empty, for transformers and engines.

    `model`: Hugging Face directory from which to take config.json and tokenizer; None: those in the checkpoint are used.
    """
    view = HuggingFaceView(source, model)
    changed = {"tie_word_embeddings": False} if view.is_value_model else NO_CHANGE
    write_directory(view, view.model, target, changed=changed)


def write_directory(weights: Weights, model: Path, target: Path, *, changed: Mapping[str, object] = NO_CHANGE) -> None:
    """Write a Hugging Face directory with these weights to `target`, new or empty, which appears when it is complete.

    Other files are copied from `model`; `changed` replaces keys of its config.json, and `quantization_config` is removed. Raises
    CheckpointError if weights are damaged, or the target cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"cannot write {target}: it exists and is not an empty directory; use another directory")
    unfinished = target.with_name(f"{UNFINISHED}{target.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write_weights(weights, unfinished)
        for file in other_files(model):
            if file.name != TENSORS:
                shutil.copy(file, unfinished)
        config = drop_quantization(unfinished / "config.json")
        if changed:
            (unfinished / "config.json").write_text(json.dumps({**config, **changed}, indent=2) + "\n")
        sync_tree(unfinished)
        unfinished.replace(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error} ({free_space(target)}); free some space or use another directory") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(weights: Weights, directory: Path) -> None:
    files = list(_cut(weights))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with default_mode(directory / file):
            save_file({name: weights.read(name).contiguous() for name in names}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(_num_bytes(weights, name) for name in weights.shapes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _num_bytes(weights: Weights, name: str) -> int:
    return prod(weights.shapes[name]) * weights.dtypes[name].itemsize


def _cut(weights: Weights) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in weights.shapes:
        if names and size + _num_bytes(weights, name) > FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _num_bytes(weights, name)
    yield names


_HEAD, _SCORE, _BIAS = "lm_head.weight", "score.weight", "score.bias"


def value_to_hf(given: Path, target: Path, *, model: Path | None = None) -> Path:
    """Convert a value model to a directory for `AutoModelForTokenClassification`; the logits [..., T, 1] are the values after each token.

    Args:
        given: a training checkpoint of either trainer, a directory of checkpoints (the newest is used), or a value model itself.
        model: directory from which to take config.json and tokenizer; None: those next to the weights are used.

    Returns:
        Directory of the value model that was converted.
    """
    checkpoint = training_checkpoint(given)
    source = saved_value_model(checkpoint) or (weights_directory(given) if checkpoint is None else weights_of(checkpoint))
    weights = HuggingFaceView(source, model) if is_distributed(source) else HuggingFaceTensors(source)
    head = weights.shapes.get(_HEAD)
    if head is None or head[0] != 1:
        found = "no separate output layer" if head is None else f"an output layer of shape {list(head)}"
        raise CheckpointError(
            f"cannot export {source} as a value model: it has {found}, expected one with one row; use a checkpoint of a run with "
            "--advantage-estimator ppo"
        )
    beside = weights.model if isinstance(weights, HuggingFaceView) else model or source
    changed = {
        "architectures": [_classifier(beside, source)],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "classifier_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    write_directory(_Classifier(weights), beside, target, changed=changed)
    return source


def _classifier(model: Path, source: Path) -> str:
    """Return the name of transformers' token classifier for a model. Raises ConfigError if its family has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

    model_type = read_config_json(model).get("model_type")
    found = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(str(model_type))
    if found is None:
        raise ConfigError(
            f"cannot export the value model: transformers {version('transformers')} has no token classifier for model_type {model_type}; "
            f"use {source} directly with --critic-load"
        )
    return found


class _Classifier:
    """Tensors of a value model under a token classifier's names, with a zero bias."""

    def __init__(self, weights: Weights) -> None:
        """Map the names. Raises CheckpointError if a tensor is quantized."""
        if quantized := sorted(weights.shapes.keys() - weights.dtypes.keys()):
            raise CheckpointError(f"cannot export {quantized[0]}: it is quantized; use the value model that a trainer saved")
        self._weights = weights
        self._sources = {_SCORE if name == _HEAD else name: name for name in weights.shapes}
        self.shapes = {name: weights.shapes[source] for name, source in self._sources.items()} | {_BIAS: (1,)}
        self.dtypes = {name: weights.dtypes[source] for name, source in self._sources.items()} | {_BIAS: weights.dtypes[_HEAD]}

    def read(self, name: str) -> Tensor:
        return torch.zeros(1, dtype=self.dtypes[_BIAS]) if name == _BIAS else self._weights.read(self._sources[name])
