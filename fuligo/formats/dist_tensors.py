"""The tensors of a distributed checkpoint, read in any parts, by one process alone, without Megatron."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from fuligo.errors import CheckpointError
from fuligo.formats.shards import Shard

_FIX = "take another checkpoint (--ckpt-step), or make this one again"


class DistributedTensors:
    """Opening it reads what is where, and checks that every file is there and long enough."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            CheckpointError: a file is missing or cut short; names it.
        """
        self.directory = directory
        self._metadata = _read_metadata(directory)
        described = self._metadata.state_dict_metadata.items()
        self._tensors = {name: tensor for name, tensor in described if isinstance(tensor, TensorStorageMetadata)}
        self.shapes = {name: tuple(tensor.size) for name, tensor in self._tensors.items()}
        """Of whole tensors."""
        self.dtypes = {name: tensor.properties.dtype for name, tensor in self._tensors.items()}
        self._last: tuple[MetadataIndex, Tensor] | None = None
        self._check_files()

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU.

        Raises:
            CheckpointError: its bytes are damaged, or parts of it are missing.
        """
        shape = self.shapes[name]
        whole = torch.empty(shape, dtype=self.dtypes[name])
        self.read_into(Shard(name, shape, (0,) * len(shape), whole))
        return whole

    @torch.no_grad()
    def read_into(self, shard: Shard) -> None:
        """Fill `shard.data`, converted to its type and device.

        Raises:
            CheckpointError: its bytes are damaged, or parts of it are missing.
        """
        num_elements = 0
        for chunk in self._tensors[shard.name].chunks:
            overlap = _overlap(chunk, shard)
            if overlap is not None:
                theirs, ours = overlap
                part = self._read_chunk(shard.name, chunk)[theirs]
                shard.data[ours].copy_(part)
                num_elements += part.numel()
        if num_elements != shard.data.numel():
            missing = f"{num_elements} of {shard.data.numel()} numbers from {list(shard.offset)} on are there"
            raise CheckpointError(f"{self.directory}: parts of {shard.name} are missing: {missing}; {_FIX}")

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """The one that was read last is kept: shards that follow each other often lie in one."""
        index = MetadataIndex(name, chunk.offsets)
        if self._last is None or self._last[0] != index:
            self._last = index, self._load(index, chunk.sizes)
        return self._last[1]

    def _load(self, index: MetadataIndex, shape: torch.Size) -> Tensor:
        place = self._metadata.storage_data[index]
        file = self.directory / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                tensor = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise CheckpointError(f"{file}: the bytes of {index.fqn} cannot be read: {error}; {_FIX}") from error
        if tensor.shape != shape:
            raise CheckpointError(f"{file}: a part of {index.fqn} has the shape {list(tensor.shape)}, not {list(shape)}; {_FIX}")
        return tensor

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
        for name, num_bytes in sorted(needed.items()):
            file = self.directory / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing: the checkpoint is incomplete; {_FIX}")
            if file.stat().st_size < num_bytes:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size} bytes, {num_bytes} were written: the checkpoint is damaged; {_FIX}"
                )


def _overlap(chunk: ChunkStorageMetadata, shard: Shard) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What both have, as slices of the one and of the other."""
    theirs: list[slice] = []
    ours: list[slice] = []
    for begin, size, offset, length in zip(chunk.offsets, chunk.sizes, shard.offset, shard.data.shape, strict=True):
        start, stop = max(begin, offset), min(begin + size, offset + length)
        if start >= stop:
            return None
        theirs.append(slice(start - begin, stop - begin))
        ours.append(slice(start - offset, stop - offset))
    return tuple(theirs), tuple(ours)


def _read_metadata(directory: Path) -> Metadata:
    try:
        return FileSystemReader(directory).read_metadata()
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no .metadata: it is no distributed checkpoint, or an incomplete one; {_FIX}") from None
    except Exception as error:  # a pickle that is cut short fails in many ways
        raise CheckpointError(f"{directory / '.metadata'}: cannot be read: {error!r}; {_FIX}") from error
