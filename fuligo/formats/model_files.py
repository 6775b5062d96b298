"""Files of a Hugging Face directory other than weights; a distributed checkpoint keeps a copy of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fuligo.errors import CheckpointError
from fuligo.formats.fp8_shards import FP8_DTYPE
from fuligo.formats.hugging_face import DamagedFileError, is_weight_file, read_stored_tensors

MODEL_FILES = "model"
"""Name of their directory in a distributed checkpoint."""
TENSORS = "tensors.json"
"""File with the safetensors dtype of every tensor of the original directory, by name."""
_STATED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def copy_model_files(source: Path, target: Path) -> None:
    """Copy config.json, tokenizer and the like from a Hugging Face directory; record names and dtypes of its weights.

    The copied config.json has no `quantization_config`: a trainer saves unquantised weights even if engines use FP8.

    Args:
        source: a Hugging Face directory, or such a copy.

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
    """Remove `quantization_config` from a config.json and return the rest."""
    config = json.loads(file.read_text()) if file.exists() else {}
    if config.pop("quantization_config", None) is not None:
        file.write_text(json.dumps(config, indent=2) + "\n")
    return config


def _before_quantisation(dtypes: dict[str, str], config: dict[str, Any]) -> dict[str, str]:
    """Return the dtypes before quantisation: FP8 tensors get the dtype that config.json states (else bf16), scales go."""
    stated = _STATED.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
    quantised = {name for name, dtype in dtypes.items() if dtype == FP8_DTYPE}
    scales = {f"{name}{suffix}" for name in quantised for suffix in ("_scale_inv", "_scale")}
    return {name: stated if name in quantised else dtype for name, dtype in dtypes.items() if name not in scales}


def other_files(directory: Path) -> list[Path]:
    """Return all files of a Hugging Face directory except weights and their index."""
    return [file for file in sorted(directory.iterdir()) if file.is_file() and not is_weight_file(file)]
