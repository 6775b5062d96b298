"""Checks of a Hugging Face directory by its config.json and safetensors headers, without reading weights."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.disk import open_plain, read_plain_text, unreadable_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_LARGEST_SIZES = {
    "num_hidden_layers": 10**4,
    "hidden_size": 10**6,
    "vocab_size": 10**8,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
}
"""Largest accepted values of keys of config.json, far above those of any model; larger values would only exhaust time and memory."""
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Largest size of a header that the safetensors format allows."""
_SAME_ARCHITECTURE = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
"""Keys of config.json that are equal in two checkpoints of one architecture."""

MXFP4 = "mxfp4"
"""`quant_method` in config.json of models with experts in MXFP4, which trainers and the embedded engine dequantize on loading."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Suffixes of the names of MXFP4 tensors."""
MTP_PREFIX = "mtp."
"""Prefix of the names of the MTP layer's weights in checkpoints of Qwen3-Next and Qwen3.5. transformers 5.12.1 ignores them."""
TENSORS = "tensors.json"
"""File of a trainer's checkpoint: safetensors dtype of every tensor of the original directory, by name."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor in a checkpoint."""

    file: str
    dtype: str
    """Safetensors name of the dtype: `BF16`, `F32`, `F8_E4M3`, ..."""
    shape: Shape
    start: int
    """Offset of the tensor's first byte in the file."""
    end: int
    """Offset of the first byte after the tensor."""


class DamagedFileError(CheckpointError):
    """Raised if a file of a checkpoint is missing, truncated or malformed; the message names it."""


def checkpoint_problems(directory: Path, *, may_be_value_model: bool = False) -> Iterator[str]:
    """Yield a message per missing, damaged or contradictory part; reads only headers. `may_be_value_model`: allow a one-row head."""
    if not directory.is_dir():
        exists = "is a file, not a directory" if directory.exists() else "does not exist"
        yield f"{directory} {exists}; use a Hugging Face directory, or the name of a model on the Hub (ORG/NAME)"
        return
    if unreadable := list(unreadable_files(directory)):
        yield from unreadable
        return
    try:
        config = read_model_config(directory)
    except DamagedFileError as error:
        yield str(error)
        return
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        yield f"{directory} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer's files into it"
    try:
        for name in _JSON_FILES:
            if (directory / name).exists():
                _read_json(directory / name)
        shapes = read_shapes(directory)
    except DamagedFileError as error:
        yield str(error)
        return
    if absurd := list(_absurd_sizes(config)):
        yield from (f"{directory / 'config.json'}: {text}" for text in absurd)
        return
    yield from (f"{directory}: {text}; use the weights' own config.json" for text in _contradictions(config, shapes, may_be_value_model))


def architecture_difference(directory: Path, other: Path) -> str | None:
    """Describe how the models of two directories differ; None if they have the same architecture."""
    mine, theirs = read_model_config(directory), read_model_config(other)
    # A missing key stands for the family's default.
    shared = [key for key in _SAME_ARCHITECTURE if mine.get(key) is not None and theirs.get(key) is not None]
    differing = [f"{key} {mine[key]} and {theirs[key]}" for key in shared if mine[key] != theirs[key]]
    return f"{directory} and {other} are different models: {', '.join(differing)}" if differing else None


def has_chat_template(directory: Path) -> bool:
    """Return False only if the tokenizer certainly has no chat template; a tokenizer with its own code may add one on loading."""
    if (directory / "chat_template.jinja").exists() or (directory / "chat_template.json").exists():
        return True
    try:
        config = _read_json(directory / "tokenizer_config.json")
    except DamagedFileError:
        return True
    return not isinstance(config, dict) or bool(config.get("chat_template")) or "auto_map" in config


def brings_code(file: Path) -> bool:
    """Return whether a config.json or tokenizer_config.json refers to Python code in its directory."""
    try:
        config = _read_json(file)
    except DamagedFileError:
        return False
    return isinstance(config, dict) and "auto_map" in config


def is_weight_file(file: Path) -> bool:
    """Return whether the file holds weights in any format, or an index of them."""
    return file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json")


def is_quantized(directory: Path) -> bool:
    """Return whether the weights are stored quantized."""
    return read_model_config(directory).get("quantization_config") is not None


def quantization_method(directory: Path) -> str | None:
    """Return `quant_method` in config.json, or `unknown` if it does not state one; None if the weights are not quantized."""
    given = read_model_config(directory).get("quantization_config")
    return str(given.get("quant_method") or "unknown") if isinstance(given, dict) else None


def is_trainable(directory: Path) -> bool:
    """Return whether a trainer can load the weights: they are not quantized, or quantized in MXFP4."""
    return quantization_method(directory) in (None, MXFP4)


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return config.json, or a multimodal one's language part. Raises DamagedFileError if it is missing, invalid or has no model_type."""
    config = _read_json(directory / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise DamagedFileError(f"cannot use {directory / 'config.json'}: it has no model_type; it must describe a Hugging Face model")
    return language_part(config)


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model: `text_config`, or all of it without that key."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def read_config_json(path: Path) -> dict[str, Any]:
    """Read the config.json at or in `path`. Raises ConfigError if it is missing, not a JSON object, or holds sizes that no model has."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = _read_json(file, missing=f"{file} does not exist; use a model's config.json, or the directory that holds it")
    except DamagedFileError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object; it must describe a Hugging Face model")
    if absurd := list(_absurd_sizes(content)):
        raise ConfigError(*(f"{file}: {text}" for text in absurd))
    return content


def read_shapes(directory: Path) -> dict[str, Shape]:
    """Return the shapes of all tensors by name; only headers are read."""
    return {name: tensor.shape for name, tensor in read_stored_tensors(directory).items()}


def read_stored_tensors(directory: Path, stem: str = "model") -> dict[str, StoredTensor]:
    """Return dtype, shape and location of all tensors by name; only headers are read. `stem`: beginning of the index file's name.

    Raises DamagedFileError if a file is missing, truncated or not a safetensors file, or a tensor is not where the index says.
    """
    index = directory / f"{stem}.safetensors.index.json"
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise DamagedFileError(f"{directory} has no *.safetensors files; save the weights in this format")
        return {name: tensor for file in files for name, tensor in read_header(file).items()}
    content = _read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedFileError(f"{index} has no weight_map; it must say which file holds each tensor")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise DamagedFileError(f"{index} names the file {file!r:.80}; it must be the name of a file of its directory")
    headers = {file: read_header(directory / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise DamagedFileError(f"{directory / file} lacks {name}, which {index.name} lists; copy or download both again")
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return dtype, shape and location of the tensors in a safetensors file, by name.

    The file begins with 8 bytes for the header's length, and the header as JSON; the data follows. Raises DamagedFileError if the file
    cannot be read, is truncated, or is not a safetensors file.
    """
    try:
        with open_plain(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            if length > size - _HEADER_LENGTH_BYTES:
                raise DamagedFileError(
                    f"{file} is truncated or not a safetensors file: it has {size} bytes, but its header claims {length}; copy or download "
                    "it again"
                )
            if length > _MAX_HEADER_BYTES:
                raise DamagedFileError(
                    f"{file} is not a safetensors file: its header claims {length:,} bytes, but the maximum is {_MAX_HEADER_BYTES:,}; copy "
                    "or download it again"
                )
            header = json.loads(stream.read(length))
        data = _HEADER_LENGTH_BYTES + length
        tensors = {name: _stored(file.name, entry, data) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise DamagedFileError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        raise DamagedFileError(f"cannot read {file}: its safetensors header is not valid; copy or download it again") from None
    expected = max((tensor.end for tensor in tensors.values()), default=data)
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise DamagedFileError(f"{file} is {state}: it has {size} bytes, but its header implies {expected}; copy or download it again")
    return tensors


def _stored(file: str, entry: dict[str, Any], data: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *entry["shape"])):
        raise ValueError("sizes must be integers")
    return StoredTensor(file, entry["dtype"], tuple(entry["shape"]), data + start, data + end)


def _absurd_sizes(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each size in config.json, or in its language model's part, that no model has."""
    text = config.get("text_config")
    if isinstance(text, dict):
        yield from _absurd_sizes(text)
    for key, most in _LARGEST_SIZES.items():
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
            yield f"{key} is {value!r:.80}; it must be an integer from 1 to {most:,}"


def _contradictions(config: dict[str, Any], shapes: dict[str, Shape], may_be_value_model: bool) -> Iterator[str]:
    """Yield a message for each contradiction between config.json and the tensors; the checks hold for every family."""
    hidden, vocab, layers = config.get("hidden_size"), config.get("vocab_size"), config.get("num_hidden_layers")
    for name, shape in shapes.items():
        if may_be_value_model and name.endswith("lm_head.weight") and shape == (1, hidden):
            continue
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and None not in (hidden, vocab) and shape != (vocab, hidden):
            yield f"{name} has shape {list(shape)}, but config.json says [vocab_size {vocab}, hidden_size {hidden}]"
        # Quantized matrices may be packed into other shapes.
        comparable = name.endswith("layers.0.self_attn.q_proj.weight") and not config.get("quantization_config")
        if comparable and hidden is not None and shape[-1] != hidden:
            yield f"{name} has shape {list(shape)}, but config.json says hidden_size {hidden}"
    stored = {int(match[1]) for name in shapes if (match := _LAYER.match(name))}
    with_next_token_layers = (layers or 0) + (config.get("num_nextn_predict_layers") or 0)
    if layers is not None and stored and not layers <= max(stored) + 1 <= with_next_token_layers:
        yield f"the weights have {max(stored) + 1} layers, but config.json says num_hidden_layers {layers}"


def _read_json(file: Path, *, missing: str = "") -> Any:
    try:
        return json.loads(read_plain_text(file))
    except FileNotFoundError:
        raise DamagedFileError(missing or f"{file} is missing; the directory must be a Hugging Face checkpoint") from None
    except OSError as error:
        raise DamagedFileError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{file} is not valid JSON ({error}); copy or download it again") from None
