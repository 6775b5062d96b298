"""Export of a checkpoint's value model for transformers: a token classifier with one label, the value."""

from pathlib import Path

import torch
from torch import Tensor

from fuligo.checkpoint.location import saved_value_model, training_checkpoint, weights_directory, weights_of
from fuligo.convert.dist_to_hf import FILE_BYTES, Weights, write_directory
from fuligo.convert.hf_view import HuggingFaceView
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.checkpoint_files import is_distributed
from fuligo.formats.hf_tensors import HuggingFaceTensors
from fuligo.formats.hugging_face import read_config_json

_HEAD, _SCORE, _BIAS = "lm_head.weight", "score.weight", "score.bias"


def value_to_hf(given: Path, target: Path, *, model: Path | None = None, file_bytes: int = FILE_BYTES) -> Path:
    """Write a directory for `AutoModelForTokenClassification`; its logit [..., T, 1] is the value of the state after each token.

    Args:
        given: a training checkpoint of either trainer, a directory of them (the newest is used), or a value model itself.
        target: a new or empty directory.
        model: directory to take config.json and tokenizer from; None takes those next to the weights.
        file_bytes: see `dist_to_hf`.

    Returns:
        Directory of the value model.

    Raises:
        CheckpointError: there is no value model, it is damaged, or the target cannot be written.
        ConfigError: transformers has no token classifier for the model's family.
    """
    checkpoint = training_checkpoint(given)
    source = saved_value_model(checkpoint) or (weights_directory(given) if checkpoint is None else weights_of(checkpoint))
    weights = HuggingFaceView(source, model) if is_distributed(source) else HuggingFaceTensors(source)
    head = weights.shapes.get(_HEAD)
    if head is None or head[0] != 1:
        shape = "no output layer of its own" if head is None else f"an output layer of shape {list(head)}"
        raise CheckpointError(
            f"cannot export {source} as a value model: it has {shape}, expected one row; use a checkpoint of a run with "
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
    write_directory(_Classifier(weights), beside, target, changed=changed, file_bytes=file_bytes)
    return source


def _classifier(model: Path, source: Path) -> str:
    """Return the name of the transformers class."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

    model_type = read_config_json(model).get("model_type")
    found = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(str(model_type))
    if found is None:
        raise ConfigError(
            f"cannot export the value model: transformers {transformers.__version__} has no token classifier for model_type {model_type}; "
            f"use {source} directly with --critic-load"
        )
    return str(found)


class _Classifier:
    """Tensors of a value model under a token classifier's names, with a zero bias."""

    def __init__(self, weights: Weights) -> None:
        """Map the names. Raises CheckpointError if a tensor is quantized."""
        quantised = sorted(weights.shapes.keys() - weights.dtypes.keys())
        if quantised:
            raise CheckpointError(f"cannot export {quantised[0]}: it is quantized; use the value model that a trainer saved")
        self._weights = weights
        self._sources = {_SCORE if name == _HEAD else name: name for name in weights.shapes}
        self.shapes = {name: weights.shapes[source] for name, source in self._sources.items()} | {_BIAS: (1,)}
        self.dtypes = {name: weights.dtypes[source] for name, source in self._sources.items()} | {_BIAS: weights.dtypes[_HEAD]}

    def read(self, name: str) -> Tensor:
        return torch.zeros(1, dtype=self.dtypes[_BIAS]) if name == _BIAS else self._weights.read(self._sources[name])
