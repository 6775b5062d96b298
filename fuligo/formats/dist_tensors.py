"""Reader of a distributed checkpoint's tensors, or any part of them, in one process and without Megatron."""

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from fuligo.errors import CheckpointError
from fuligo.formats.disk import open_plain
from fuligo.formats.shards import Shard

_FIX = "use another checkpoint (--ckpt-step) or create this one again"


class DistributedTensors:
    """Tensors of a distributed checkpoint, read on demand."""

    def __init__(self, directory: Path) -> None:
        """Read the metadata. Raises CheckpointError, naming the file, if one is missing, truncated or not what torch writes."""
        self.directory = directory
        self._metadata = _read_metadata(directory)
        try:
            self._tensors = _tensors_of(self._metadata)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise CheckpointError(f"cannot read {directory / '.metadata'}: it contradicts itself ({error!r:.200}); {_FIX}") from error
        self.shapes = {name: tuple(tensor.size) for name, tensor in self._tensors.items()}
        """Shapes of the whole tensors, by name."""
        self.dtypes = {name: tensor.properties.dtype for name, tensor in self._tensors.items()}
        self._last: tuple[MetadataIndex, Tensor] | None = None
        self._check_files()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError if it is damaged, incomplete, or does not fit into memory."""
        shape = self.shapes[name]
        num_elements, num_held = math.prod(shape), sum(math.prod(chunk.sizes) for chunk in self._tensors[name].chunks)
        if num_held < num_elements:  # checked before memory for all of them is allocated
            raise CheckpointError(f"cannot read {name} from {self.directory}: it has {num_held} of {num_elements} elements; {_FIX}")
        try:
            whole = torch.empty(shape, dtype=self.dtypes[name])
        except RuntimeError as error:
            raise CheckpointError(
                f"cannot read {name} from {self.directory}: {num_elements:,} elements do not fit into memory; use a larger machine"
            ) from error
        self.read_into(Shard(name, shape, (0,) * len(shape), whole))
        return whole

    @torch.no_grad()
    def read_into(self, shard: Shard) -> None:
        """Fill `shard.data`, converted to its dtype and device. Raises CheckpointError if its bytes are damaged or incomplete."""
        num_elements = 0
        for chunk in self._tensors[shard.name].chunks:
            if (overlap := _overlap(chunk, shard)) is not None:
                theirs, ours = overlap
                # The last chunk is kept, because consecutive shards often share it.
                index = MetadataIndex(shard.name, chunk.offsets)
                if self._last is None or self._last[0] != index:
                    self._last = index, self._load(index, chunk.sizes)
                part = self._last[1][theirs]
                shard.data[ours].copy_(part)
                num_elements += part.numel()
        if num_elements != shard.data.numel():
            found = f"it has {num_elements} of {shard.data.numel()} elements from offset {list(shard.offset)}"
            raise CheckpointError(f"cannot read {shard.name} from {self.directory}: {found}; {_FIX}")

    def _load(self, index: MetadataIndex, shape: torch.Size) -> Tensor:
        place = self._metadata.storage_data[index]
        file = self.directory / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                tensor = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch advises loading it without restrictions
            found = re.search(r"GLOBAL ([\w.]+)", str(error))
            reason = "its bytes are damaged" if found is None else f"{found[1]} is not allowed in a tensor, since it could run code"
            raise CheckpointError(f"cannot read {index.fqn} from {file}: {reason}; {_FIX}") from error
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"cannot read {index.fqn} from {file}: {error}; {_FIX}") from error
        if tensor.shape != shape:
            raise CheckpointError(
                f"cannot read {index.fqn} from {file}: a chunk has shape {list(tensor.shape)}, expected {list(shape)}; {_FIX}"
            )
        return tensor

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
        for name, num_bytes in sorted(needed.items()):
            file = self.directory / name
            if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"cannot load {self.directory}: its metadata refers to {name}, outside the checkpoint; {_FIX}")
            if not file.is_file():
                raise CheckpointError(f"cannot load {self.directory}: {file} is missing; {_FIX}")
            if file.stat().st_size < num_bytes:
                raise CheckpointError(f"cannot load {self.directory}: {file} has {file.stat().st_size} bytes, expected {num_bytes}; {_FIX}")


def _overlap(chunk: ChunkStorageMetadata, shard: Shard) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap as slices of the chunk and of the shard, or None."""
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
    """Read `.metadata` with an unpickler that can build only metadata: an untrusted checkpoint must not run code."""
    try:
        with open_plain(directory / ".metadata") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(
                f"it holds an object of type {type(metadata).__name__}, not the metadata of a distributed checkpoint"
            )
        return metadata
    except FileNotFoundError:
        raise CheckpointError(
            f"cannot load {directory}: it has no .metadata, so it is not a complete distributed checkpoint; {_FIX}"
        ) from None
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"cannot read {directory / '.metadata'}: {error!r}; {_FIX}") from error


_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "Path"),
}  # fmt: skip


def _tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of all tensors by name, after checking every value that reading them relies on.

    Raises AttributeError, TypeError, ValueError or LookupError if a value is not what torch writes.
    """
    tensors = {name: tensor for name, tensor in metadata.state_dict_metadata.items() if isinstance(tensor, TensorStorageMetadata)}
    for place in metadata.storage_data.values():
        if not isinstance(place.relative_path, str) or min(_counts((place.offset, place.length))) < 0:
            raise ValueError(f"a part is at {place!r:.100}, which is not a place in a file")
    for name, tensor in tensors.items():
        dtype = tensor.properties.dtype
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name!r:.100} has the dtype {dtype!r:.40}, which is not a dtype of torch")
        size = _counts(tensor.size)
        for chunk in tensor.chunks:
            offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
            ends = [begin + length for begin, length in zip(offsets, sizes, strict=True)]
            if any(end > most for end, most in zip(ends, size, strict=True)):
                raise ValueError(f"a part of {name:.100} ends at {ends}, beyond {list(size)}")
            num_bytes = metadata.storage_data[MetadataIndex(name, chunk.offsets)].length
            if num_bytes < (least := math.prod(sizes) * dtype.itemsize):
                raise ValueError(f"a part of {name:.100} with the shape {list(sizes)} has {num_bytes} bytes instead of at least {least}")
    return tensors


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{values!r:.100} are not sizes: they must be a tuple of integers of at least 0")
    return values


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler restricted to the plain data classes of `torch.distributed.checkpoint` metadata.

    It extends Python's unpickler, not the one in C, which is about three times as fast, but allocates 32 GiB for a nine-byte pickle that
    stores a memo entry under the index 2^31.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")
