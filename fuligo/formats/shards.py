"""Tensor shards, and the functions that write them to a distributed checkpoint.

The format is that of `torch.distributed.checkpoint` (torch_dist in Megatron-Core): every rank writes its shards to its own files, and
`.metadata` indexes them. Readers may split tensors differently: a part is read from all shards that it overlaps.
"""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fuligo.errors import CheckpointError


@dataclass(slots=True, frozen=True)
class Box:
    """Rectangular part of a tensor whose elements are consecutive in the flattened tensor."""

    start: int
    """Index of the first element in the flattened tensor."""
    offset: tuple[int, ...]
    """Index of the first element, by axis."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Cover the elements [start, end) of a flattened vector or matrix with at most three boxes: a row's end, whole rows, a row's start."""
    assert len(shape) in (1, 2), "weights are vectors and matrices"
    if len(shape) == 1:
        return [Box(start, (start,), (end - start,))] if end > start else []
    columns = shape[1]
    found: list[Box] = []
    while start < end:
        row, column = divmod(start, columns)
        if column or end - start < columns:
            width = min(columns - column, end - start)
            box = Box(start, (row, column), (1, width))
        else:
            box = Box(start, (row, 0), ((end - start) // columns, columns))
        found.append(box)
        start += box.size
    return found


THREADS = 2
"""Number of files that a rank writes concurrently."""

logging.getLogger("torch.distributed.checkpoint._dedup_save_plans").setLevel(logging.WARNING)


@dataclass(slots=True, frozen=True)
class Shard:
    """Rectangular part of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the part's first element in the whole tensor, by axis."""
    data: Tensor
    """Data of the part; for reading, the memory to fill."""

    def on_cpu(self) -> Shard:
        """Return a CPU copy that later training steps do not change."""
        return replace(self, data=self.data.detach().to("cpu", copy=True))

    def flat_range(self, name: str, flat: Tensor, start: int, end: int) -> Iterator[Shard]:
        """Yield shards of another tensor with the same layout, such as an Adam moment, for a range of this part's flattened elements.

        Args:
            flat: [end - start] values of the other tensor `name`.
            start: index of the first element in the flattened part.
        """
        for box in boxes(tuple(self.data.shape), start, end):
            offset = tuple(whole + part for whole, part in zip(self.offset, box.offset, strict=True))
            data = flat[box.start - start : box.start - start + box.size].view(box.shape)
            yield Shard(name, self.shape, offset, data)


@dataclass(slots=True, frozen=True)
class Unread:
    """Whole tensor that is read only when it is written, so that few tensors are in memory at a time."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def write_format(directory: Path) -> None:
    """Write the files that make a directory of shards a torch_dist checkpoint of Megatron-Core; call it on one rank."""
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(versions))
    torch.save({"content_metadata": {"names": "local layers"}}, directory / "common.pt")


def write_shards(directory: Path, shards: Sequence[Shard | Unread], group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards, which together must cover each tensor exactly once. A collective of `group`.

    `group`: gloo group of all ranks (it carries Python objects); None for a single rank. Raises CheckpointError on every rank if one could
    not write.
    """
    writer = _Writer(directory, thread_count=THREADS, sync_files=True)
    try:
        with warnings.catch_warnings():
            # A single process needs no process group.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            save({}, storage_writer=writer, planner=_Planner(shards), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # derives from BaseException
        first, (failure, _) = min(error.failures.items())
        raise CheckpointError(f"cannot write {directory}: rank {first} failed: {failure!r}") from error


class _Writer(FileSystemWriter):
    """Writer that raises errors of its threads; torch 2.13 ignores them, and the checkpoint would silently lack a file."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self._files = _Files()
        self.fs = self._files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        finally:
            if self._files.errors:
                raise self._files.errors[0]


class _Files(FileSystem):
    """File system that collects the errors of its streams."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            why = error.__context__  # on a full disk, torch.save reports only that it cannot close its archive
            self.errors.append(why if isinstance(why, OSError) else error)
            raise


class _Planner(DefaultSavePlanner):
    """Save planner that writes shards as they are."""

    def __init__(self, shards: Sequence[Shard | Unread]) -> None:
        super().__init__(flatten_state_dict=False)
        self._items = [_write_item(shard) for shard in shards]
        self._shards = {(item.index.fqn, item.index.offset): shard for item, shard in zip(self._items, shards, strict=True)}
        assert len(self._shards) == len(shards), "a rank writes no part twice"

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that the shards of all ranks cover each tensor exactly. Raises ValueError if shards overlap, or do not cover a tensor."""
        plans, metadata = super().create_global_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():  # torch checks this only with several ranks.
            assert isinstance(tensor, TensorStorageMetadata)
            num_written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if num_written != tensor.size.numel():
                raise ValueError(f"the shards of {name} have {num_written} of {tensor.size.numel()} elements")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        shard = self._shards[write_item.index.fqn, write_item.index.offset]
        return shard.read() if isinstance(shard, Unread) else shard.data.detach()


def _write_item(shard: Shard | Unread) -> WriteItem:
    if isinstance(shard, Unread):
        offset, part, dtype = (0,) * len(shard.shape), shard.shape, shard.dtype
    else:
        offset, part, dtype = shard.offset, tuple(shard.data.shape), shard.data.dtype
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(part))
    written = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shard.shape))
    return WriteItem(MetadataIndex(shard.name, torch.Size(offset)), WriteItemType.SHARD, tensor_data=written)
