"""Plan of the files of an FP8 checkpoint, made from the headers of the source files."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter

from fuligo.formats.hugging_face import Shape, StoredTensor
from fuligo.formats.quantization import Quantization, expert_parts, is_quantized_matrix

FP8_DTYPE = "F8_E4M3"
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}
"""Dtypes that can be quantized, with their size in bytes."""
_JOINED = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "q_a_proj": 1, "gate_proj": 1, "up_proj": 1, "gate_up_proj": 2}
"""Modules that engines fuse with others along rows, and the number of fused parts that each already holds. No block may span two parts."""
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """Tensor of the new checkpoint and the source bytes it is made from."""

    name: str
    shape: Shape
    source: StoredTensor
    start: int
    """Offset of the source bytes in the source file."""
    is_quantized: bool

    @property
    def end(self) -> int:
        return self.start + prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Number of bytes per value in the source."""
        return (self.source.end - self.source.start) // max(1, prod(self.source.shape))


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensor as written to the new file."""

    name: str
    dtype: str
    shape: Shape
    num_bytes: int

    @property
    def width(self) -> int:
        """Number of bytes per value."""
        return self.num_bytes // max(1, prod(self.shape))


@dataclass(frozen=True, slots=True)
class Shard:
    """File of the new checkpoint, with the name of its source file."""

    file: str
    tensors: tuple[TargetTensor, ...]
    """Tensors in the order of their bytes in the source."""
    quantization: Quantization

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Entries by decreasing width, then name, which is safetensors' order: each tensor is aligned to its width."""
        entries = [entry for tensor in self.tensors for entry in _entries(tensor, self.quantization)]
        return tuple(sorted(entries, key=lambda entry: (-entry.width, entry.name)))

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(entry.num_bytes for entry in self.entries)

    def header(self) -> tuple[bytes, dict[str, int]]:
        """Return the bytes before the data (length and header), and the offset of each tensor in the file by name."""
        places: dict[str, int] = {}
        written: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for entry in self.entries:
            places[entry.name] = position
            written[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, position + entry.num_bytes]}
            position += entry.num_bytes
        text = json.dumps(written, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        beginning = len(text).to_bytes(8, "little") + text
        return beginning, {name: len(beginning) + place for name, place in places.items()}


def plan_shards(stored: Mapping[str, StoredTensor], quantization: Quantization) -> tuple[Shard, ...]:
    """Return a plan of one file for each file of the source."""
    by_file: dict[str, list[TargetTensor]] = {}
    for name, tensor in stored.items():
        by_file.setdefault(tensor.file, []).extend(_target_tensors(name, tensor))
    return tuple(Shard(file, tuple(sorted(tensors, key=attrgetter("start"))), quantization) for file, tensors in sorted(by_file.items()))


def shard_problems(shards: tuple[Shard, ...], quantization: Quantization) -> Iterator[str]:
    """Yield the reasons why the source cannot be quantized, or engines could not load the result."""
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    if any(tensor.source.dtype.startswith("F8") for tensor in tensors):
        yield "the checkpoint is already quantized (FP8 tensors); use the bf16 checkpoint it was made from"
        return
    matrices = [tensor for tensor in tensors if tensor.is_quantized]
    if not matrices:
        yield "the checkpoint has nothing to quantize: no tensor is a matrix of an attention or MLP layer"
    other_types = [f"{tensor.name} ({tensor.source.dtype})" for tensor in matrices if tensor.source.dtype not in _FLOATS]
    if other_types:
        yield f"cannot quantize {_listed(other_types)}: the dtype must be one of {', '.join(_FLOATS)}"
    if quantization.block_size is not None:
        rows = quantization.block_size[0]
        if spanned := [f"{tensor.name} {list(tensor.shape)}" for tensor in matrices if _part_rows(tensor) % rows]:
            yield (
                f"blocks of {rows} rows do not divide {_listed(spanned)}: engines fuse these matrices with others, and no block may span "
                "two of them; use --strategy channel, or a --block-size that divides their rows (DeepEP supports 128 128 only)"
            )
    if quantization.strategy == "tensor" and any(_module(tensor) == "q_a_proj" for tensor in matrices):
        yield (
            "--strategy tensor does not work with latent attention: SGLang fuses q_a_proj and kv_a_proj_with_mqa under one scale; "
            "use block or channel"
        )


def unquantized_modules(shards: tuple[Shard, ...]) -> list[str]:
    """Return the names of the modules whose weight is a matrix that is not quantized."""
    return [
        tensor.name.removesuffix(".weight")
        for shard in shards
        for tensor in shard.tensors
        if not tensor.is_quantized and len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    ]


def _target_tensors(name: str, tensor: StoredTensor) -> Iterator[TargetTensor]:
    parts = expert_parts(name, tensor.shape)
    if not parts:
        yield TargetTensor(name, tensor.shape, tensor, tensor.start, is_quantized_matrix(name, tensor.shape))
        return
    _, rows, columns = tensor.shape
    row_bytes = (tensor.end - tensor.start) // prod(tensor.shape[:2])
    for part in parts:
        start = tensor.start + (part.expert * rows + part.first_row) * row_bytes
        yield TargetTensor(part.name, (part.num_rows, columns), tensor, start, is_quantized=True)


def _entries(tensor: TargetTensor, quantization: Quantization) -> Iterator[Entry]:
    if not tensor.is_quantized:
        yield Entry(tensor.name, tensor.source.dtype, tensor.shape, tensor.end - tensor.start)
        return
    scales = quantization.scale_shape(tensor.shape)
    yield Entry(tensor.name, FP8_DTYPE, tensor.shape, prod(tensor.shape))
    yield Entry(quantization.scale_name(tensor.name), "F32", scales, 4 * prod(scales))


def _module(tensor: TargetTensor) -> str:
    return tensor.name.rsplit(".", 2)[-2]


def _part_rows(tensor: TargetTensor) -> int:
    """Return the number of rows of each part that an engine fuses with others; 0 if it fuses none."""
    parts = _JOINED.get(_module(tensor))
    return 0 if parts is None else tensor.shape[0] // parts


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
