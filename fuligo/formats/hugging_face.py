"""Whether a directory is a whole Hugging Face checkpoint, seen from its files alone: config.json and the headers of its safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuligo.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_HEADER_LENGTH_BYTES = 8
_SAME_ARCHITECTURE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
"""Keys of config.json in which two checkpoints of one model agree."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is."""

    file: str
    """In the checkpoint's directory."""
    dtype: str
    """As safetensors writes it: `BF16`, `F32`, `F8_E4M3`, ..."""
    shape: Shape
    start: int
    """Of its bytes, counted from the beginning of the file."""
    end: int


class DamagedFileError(Exception):
    """A file is not what it should be; the text names it."""


def checkpoint_problems(directory: Path, *, may_be_value_model: bool = False) -> Iterator[str]:
    """What is missing, damaged or contradictory, one text each.

    Args:
        may_be_value_model: an output layer of one row is one.
    """
    if not directory.is_dir():
        exists = "is a file, not a directory" if directory.exists() else "does not exist"
        yield f"{directory} {exists}; give a local Hugging Face directory (`hf download NAME --local-dir DIR` makes one)"
        return
    try:
        config = read_model_config(directory)
    except DamagedFileError as error:
        yield str(error)
        return
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        yield f"{directory} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})"
    try:
        shapes = read_shapes(directory)
    except DamagedFileError as error:
        yield str(error)
        return
    yield from (f"{directory}: {text}" for text in _contradictions(config, shapes, may_be_value_model))


def architecture_difference(directory: Path, other: Path) -> str | None:
    """How the models of two directories differ, or None where they are of one architecture.

    Raises:
        DamagedFileError: a config.json is missing or unreadable.
    """
    mine, theirs = read_model_config(directory), read_model_config(other)
    # A key that one of them lacks has the family's default there.
    shared = [key for key in _SAME_ARCHITECTURE if mine.get(key) is not None and theirs.get(key) is not None]
    differing = [f"{key} {mine[key]} and {theirs[key]}" for key in shared if mine[key] != theirs[key]]
    return f"{directory} and {other} are different models: {', '.join(differing)}" if differing else None


def has_chat_template(directory: Path) -> bool:
    """Its tokenizer has one, or may: one that comes with code of its own tells only when it is loaded."""
    if (directory / "chat_template.jinja").exists() or (directory / "chat_template.json").exists():
        return True
    try:
        config = _read_json(directory / "tokenizer_config.json")
    except DamagedFileError:
        return True
    return not isinstance(config, dict) or bool(config.get("chat_template")) or "auto_map" in config


def is_weight_file(file: Path) -> bool:
    """It holds weights, in whatever format, or says where they are: of no use beside other weights of the model."""
    return file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json")


def is_quantised(directory: Path) -> bool:
    """The weights are stored in fewer bits than they were trained in.

    Raises:
        DamagedFileError: config.json is missing or unreadable.
    """
    return read_model_config(directory).get("quantization_config") is not None


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json; of a multi-modal model the part that describes the language model.

    Raises:
        DamagedFileError: it is missing or unreadable.
    """
    config = _read_json(directory / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise DamagedFileError(f"{directory / 'config.json'} has no model_type; it must describe a Hugging Face model")
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def read_config_json(path: Path) -> dict[str, Any]:
    """The config.json at `path`, or of the directory `path`.

    Raises:
        ConfigError: it is missing, unreadable, or not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; give a model's config.json, or the directory that holds it") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object; it must describe a Hugging Face model")
    return content


def read_shapes(directory: Path) -> dict[str, Shape]:
    """Name -> shape of all tensors, from the headers alone.

    Raises:
        DamagedFileError: as `read_stored_tensors`.
    """
    return {name: tensor.shape for name, tensor in read_stored_tensors(directory).items()}


def read_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name -> type, shape and place of all tensors, from the headers alone.

    Raises:
        DamagedFileError: a file is missing, truncated, or no safetensors file; or a tensor is not where the index says.
    """
    index = directory / _INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise DamagedFileError(f"{directory} has no *.safetensors files with weights")
        return {name: tensor for file in files for name, tensor in read_header(file).items()}
    content = _read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedFileError(f"{index} has no weight_map; it must say which file holds each tensor")
    headers = {file: read_header(directory / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise DamagedFileError(f"{directory / file} lacks {name}, which {_INDEX} says is there")
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Of one safetensors file: 8 bytes with the header's length, the header as JSON, then the data, to the byte.

    Raises:
        DamagedFileError: it cannot be read, is truncated, or no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            if length > size - _HEADER_LENGTH_BYTES:
                raise DamagedFileError(f"{file} is truncated or no safetensors file: it has {size} bytes, its header alone {length}")
            header = json.loads(stream.read(length))
        data = _HEADER_LENGTH_BYTES + length
        tensors = {name: _stored(file.name, entry, data) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise DamagedFileError(f"{file} is no safetensors file: its header is not valid") from None
    expected = max((tensor.end for tensor in tensors.values()), default=data)
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise DamagedFileError(f"{file} is {state}: it has {size} bytes, its header says {expected}; copy or download it again")
    return tensors


def _stored(file: str, entry: dict[str, Any], data: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(file, entry["dtype"], tuple(entry["shape"]), data + start, data + end)


def _contradictions(config: dict[str, Any], shapes: dict[str, Shape], may_be_value_model: bool) -> Iterator[str]:
    """Where the tensors are not those of the model that config.json describes. Only what holds for every family is compared."""
    hidden, vocab, layers = config.get("hidden_size"), config.get("vocab_size"), config.get("num_hidden_layers")
    for name, shape in shapes.items():
        if may_be_value_model and name.endswith("lm_head.weight") and shape == (1, hidden):
            continue
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and None not in (hidden, vocab) and shape != (vocab, hidden):
            yield f"{name} has the shape {list(shape)}, config.json says [vocab_size {vocab}, hidden_size {hidden}]: another architecture"
        # Quantised matrices may be packed in shapes of their own.
        comparable = name.endswith("layers.0.self_attn.q_proj.weight") and not config.get("quantization_config")
        if comparable and hidden is not None and shape[-1] != hidden:
            yield f"{name} has the shape {list(shape)}, config.json says hidden_size {hidden}: another architecture"
    stored = {int(match[1]) for name in shapes if (match := _LAYER.match(name))}
    with_next_token_layers = (layers or 0) + (config.get("num_nextn_predict_layers") or 0)
    if layers is not None and stored and not layers <= max(stored) + 1 <= with_next_token_layers:
        yield f"the weights have {max(stored) + 1} layers, config.json says num_hidden_layers {layers}: another architecture"


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedFileError(f"{file} is missing; the directory must be a Hugging Face checkpoint") from None
    except OSError as error:
        raise DamagedFileError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedFileError(f"{file} is not valid JSON ({error})") from None
