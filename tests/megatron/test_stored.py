"""Checkpoints with missing or additional tensors are refused before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.weights.stored import StoredWeights
from tests import tiny

Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)


def read(directory: Path, num_mtp_layers: int = 0) -> None:
    with StoredWeights(directory, names_of(read_config_json(directory)), num_mtp_layers):
        pass


def rewrite(directory: Path, change: Change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (
            lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": torch.zeros(64)}),
            r"contains tensors that config\.json does not account for: model\.layers\.2\.input_layernorm\.weight",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}),
            r"different shapes than config\.json says: model\.norm\.weight \[65\] instead of \[64\]",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name],
            r"lacks (model\.layers\.1\.\S+, ){4}model\.layers\.1\.\S+ and 6 more",
        ),
    ],
)
def test_what_does_not_fit_is_named(checkpoint: Path, change: Change, message: str):
    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=message):
        read(checkpoint)


def test_leftovers_that_everyone_has_are_no_fault(checkpoint: Path):
    rewrite(
        checkpoint,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )
    read(checkpoint)


def test_quantized_weights_are_refused(checkpoint: Path):
    config = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="use the checkpoint in bf16"):
        read(checkpoint)


def test_more_prediction_layers_than_there_are_are_refused(checkpoint: Path):
    with pytest.raises(CheckpointError, match=r"--mtp-num-layers 1: .* has 0 MTP layers"):
        read(checkpoint, num_mtp_layers=1)


def test_a_damaged_file_is_named(checkpoint: Path):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        read(checkpoint)
