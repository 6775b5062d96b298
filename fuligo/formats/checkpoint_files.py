"""Names of a checkpoint's files and directories, and copies of Hugging Face files other than weights in it. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuligo.formats.fp8_shards import FP8_DTYPE
from fuligo.formats.hugging_face import MXFP4_BLOCKS, MXFP4_SCALES, TENSORS, is_weight_file, read_stored_tensors
from fuligo.formats.quantization import expert_parts
from fuligo.formats.stored_experts import StoredExperts, mixtral_name

if TYPE_CHECKING:
    from torch import Tensor


TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of the tracker, and name of the directory, of a checkpoint with weights only, as conversions write it."""
UNFINISHED = ".tmp_"
"""Prefix of files and directories that are being written or removed; the next start deletes those that a crash left."""
LOCK = ".lock"
"""Lock file that a run holds while it saves to a directory of checkpoints."""
VALUE_MODEL = "critic"
"""Directory of the value model's weights in a checkpoint."""
COUNTERS = "trainer.json"
"""File with the trainer's progress counters in a checkpoint."""


def is_distributed(directory: Path) -> bool:
    """Return whether `directory` itself is a distributed checkpoint (not a directory of checkpoints)."""
    return (directory / ".metadata").is_file()


def model_directory(weights: Path) -> Path:
    """Return the directory with config.json and tokenizer for `weights`, a Hugging Face directory or a distributed checkpoint."""
    return weights / MODEL_FILES if is_distributed(weights) else weights


def no_value_model(checkpoint: Path) -> str:
    """Return the error message for a run with a value model that resumes from a checkpoint without one."""
    return (
        f"cannot resume {checkpoint} with --advantage-estimator ppo: the checkpoint has no value model; set its initial weights with "
        "--critic-load DIR (a Hugging Face directory of the policy's architecture), or resume with the checkpoint's estimator"
    )


MODEL_FILES = "model"
"""Directory with config.json and tokenizer in a distributed checkpoint."""
_STATED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def copy_model_files(source: Path, target: Path) -> None:
    """Copy the files of a Hugging Face directory except weights to `target`, and record the weights' names and dtypes (`record_dtypes`).

    The copied config.json has no `quantization_config`: a trainer saves unquantized weights even if engines use FP8.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in other_files(source):
        shutil.copy(file, target)
    drop_quantization(target / "config.json")
    record_dtypes(source, target)


def record_dtypes(source: Path, target: Path) -> None:
    """Write the names and dtypes of a Hugging Face directory's weights to `tensors.json` in `target`, or copy it if `source` has one.

    FP8 and MXFP4 weights are listed as before quantization. Nothing is written if `source` has neither this file nor safetensors files.
    """
    if (source / TENSORS).exists():
        shutil.copy(source / TENSORS, target)
    elif any(source.glob("*.safetensors")):
        stored = {name: tensor.dtype for name, tensor in read_stored_tensors(source).items()}
        config = json.loads((source / "config.json").read_text()) if (source / "config.json").exists() else {}
        (target / TENSORS).write_text(json.dumps(_before_quantization(stored, config), indent=0))


def drop_quantization(file: Path) -> dict[str, Any]:
    """Remove `quantization_config` from a config.json, if it exists, and return the other keys; empty if there is no file."""
    config = json.loads(file.read_text()) if file.exists() else {}
    if config.pop("quantization_config", None) is not None:
        file.write_text(json.dumps(config, indent=2) + "\n")
    return config


def _before_quantization(dtypes: dict[str, str], config: dict[str, Any]) -> dict[str, str]:
    """Return the dtypes before quantization: FP8 and MXFP4 tensors get the dtype in config.json (else BF16), and scales are dropped."""
    stated = _STATED.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
    quantized = {name for name, dtype in dtypes.items() if dtype == FP8_DTYPE}
    scales = {f"{name}{suffix}" for name in quantized for suffix in ("_scale_inv", "_scale")}
    packed = {name.removesuffix(MXFP4_BLOCKS) for name, dtype in dtypes.items() if name.endswith(MXFP4_BLOCKS) and dtype == "U8"}
    scales |= {name + suffix for name in packed for suffix in (MXFP4_BLOCKS, MXFP4_SCALES)}
    return dict.fromkeys(sorted(packed), stated) | {
        name: stated if name in quantized else dtype for name, dtype in dtypes.items() if name not in scales
    }


def other_files(directory: Path) -> list[Path]:
    """Return all files of a Hugging Face directory except weights and their index."""
    return [file for file in sorted(directory.iterdir()) if file.is_file() and not is_weight_file(file)]


def checkpoint_weights(
    named_weights: Iterable[tuple[str, Tensor]], experts: StoredExperts = StoredExperts.APART
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint: fused expert tensors are split into per-expert matrices (as views), others are unchanged.

    If `experts` is `WHOLE`, none are split; `MIXTRAL` also renames routers and experts.
    """
    renamed: Callable[[str], str] = mixtral_name if experts is StoredExperts.MIXTRAL else str
    for name, weight in named_weights:
        parts = [] if experts is StoredExperts.WHOLE else expert_parts(name, tuple(weight.shape))
        if not parts:
            yield renamed(name), weight
        for part in parts:
            yield renamed(part.name), weight[part.expert, part.first_row : part.first_row + part.num_rows]


def prediction_prefixes(config_json: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the name prefixes of the MTP layers' weights (DeepSeek-V3 and the families that follow its names).

    MTP layers are numbered after the model's layers. transformers 5.12.1 does not implement them.
    """
    first, number = config_json.get("num_hidden_layers"), config_json.get("num_nextn_predict_layers")
    return tuple(f"model.layers.{first + depth}." for depth in range(number or 0)) if first is not None else ()
