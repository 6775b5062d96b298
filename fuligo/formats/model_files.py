"""The files beside the weights of a Hugging Face directory, which a distributed checkpoint carries along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fuligo.errors import CheckpointError
from fuligo.formats.fp8_shards import FP8_DTYPE
from fuligo.formats.hugging_face import DamagedFileError, is_weight_file, read_stored_tensors

MODEL_FILES = "model"
"""Directory in a distributed checkpoint."""
TENSORS = "tensors.json"
"""Name -> type (as safetensors writes it) of every tensor of the directory that the files were copied from."""
_STATED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def copy_model_files(source: Path, target: Path) -> None:
    """Copy config.json, tokenizer and the like from a Hugging Face directory; of the weights, note names and types.

    The weights that a trainer saves are not quantised, even where engines have an FP8 checkpoint: nor do the copies say so.

    Args:
        source: may itself have been made so.

    Raises:
        CheckpointError: its weights are damaged.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in other_files(source):
        shutil.copy(file, target)
    config = drop_quantisation(target / "config.json")
    if not (source / TENSORS).exists() and any(source.glob("*.safetensors")):
        try:
            tensors = _before_quantisation({name: tensor.dtype for name, tensor in read_stored_tensors(source).items()}, config)
        except DamagedFileError as error:
            raise CheckpointError(str(error)) from None
        (target / TENSORS).write_text(json.dumps(tensors, indent=0))


def drop_quantisation(file: Path) -> dict[str, Any]:
    """From a config.json, beside weights that are not quantised; what it says afterwards."""
    config = json.loads(file.read_text()) if file.exists() else {}
    if config.pop("quantization_config", None) is not None:
        file.write_text(json.dumps(config, indent=2) + "\n")
    return config


def _before_quantisation(dtypes: dict[str, str], config: dict[str, Any]) -> dict[str, str]:
    """Types without FP8 and its scales: what is in FP8 had the type that config.json states, else bf16."""
    stated = _STATED.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
    quantised = {name for name, dtype in dtypes.items() if dtype == FP8_DTYPE}
    scales = {f"{name}{suffix}" for name in quantised for suffix in ("_scale_inv", "_scale")}
    return {name: stated if name in quantised else dtype for name, dtype in dtypes.items() if name not in scales}


def other_files(directory: Path) -> list[Path]:
    """All files of a Hugging Face directory but the weights and their index."""
    return [file for file in sorted(directory.iterdir()) if file.is_file() and not is_weight_file(file)]
