"""Parts of tensors, and the files of a distributed checkpoint that they go to and come from.

The format is that of `torch.distributed.checkpoint` (Megatron-Core calls it torch_dist): every rank writes its parts into files of its
own, `.metadata` says what is where, and a part of any other shape is read from those that it overlaps.
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
from fuligo.formats.boxes import boxes

THREADS = 2
"""Files that a rank writes at a time."""

logging.getLogger("torch.distributed.checkpoint._dedup_save_plans").setLevel(logging.WARNING)


@dataclass(slots=True, frozen=True)
class Shard:
    """A rectangular part of a tensor."""

    name: str
    """The tensor's, in the checkpoint."""
    shape: tuple[int, ...]
    """The whole tensor's."""
    offset: tuple[int, ...]
    """Where the part begins."""
    data: Tensor
    """The part; a view of live memory where it is read into."""

    def on_cpu(self) -> Shard:
        """A copy that later steps of the training leave alone."""
        return replace(self, data=self.data.detach().to("cpu", copy=True))

    def flat_range(self, name: str, flat: Tensor, start: int, end: int) -> Iterator[Shard]:
        """The elements [start, end) of the flattened part, of another tensor (a moment, say) that is laid out as this one.

        Args:
            flat: [end - start]
        """
        for box in boxes(tuple(self.data.shape), start, end):
            offset = tuple(whole + part for whole, part in zip(self.offset, box.offset, strict=True))
            data = flat[box.start - start : box.start - start + box.size].view(box.shape)
            yield Shard(name, self.shape, offset, data)


@dataclass(slots=True, frozen=True)
class Unread:
    """A whole tensor that is read when its turn to be written comes, so that no more than a few are in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def write_format(directory: Path) -> None:
    """What makes a directory of shards one of Megatron-Core's torch_dist checkpoints; once, by one rank."""
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(versions))
    torch.save({"content_metadata": {"names": "local layers"}}, directory / "common.pt")


def write_shards(directory: Path, shards: Sequence[Shard | Unread], group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards; together they must be whole tensors, each element once. A collective of `group`.

    Args:
        directory: is there.
        group: of all ranks; it carries Python objects, so one of gloo. None where there is one rank.

    Raises:
        CheckpointError: a rank could not write; on every rank.
    """
    writer = _Writer(directory, thread_count=THREADS, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # one process is enough
            save({}, storage_writer=writer, planner=_Planner(shards), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException
        first, (failure, _) = min(error.failures.items())
        raise CheckpointError(f"{directory}: rank {first} could not write its part: {failure!r}") from error


class _Writer(FileSystemWriter):
    """torch 2.13 passes over errors of the threads that it writes with: the checkpoint would lack a file, and nobody would know."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.fs = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        finally:
            if self.fs.errors:
                raise self.fs.errors[0]


class _Files(FileSystem):
    def __init__(self) -> None:
        self.errors: list[Exception] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            why = error.__context__  # of a disk that refuses, torch.save says that it cannot end its archive
            self.errors.append(why if isinstance(why, OSError) else error)
            raise


class _Planner(DefaultSavePlanner):
    """Plans to write shards as they are."""

    def __init__(self, shards: Sequence[Shard | Unread]) -> None:
        super().__init__(flatten_state_dict=False)
        self._items = [_write_item(shard) for shard in shards]
        self._shards = {(item.index.fqn, item.index.offset): shard for item, shard in zip(self._items, shards, strict=True)}
        assert len(self._shards) == len(shards), "a rank writes no part twice"

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """
        Raises:
            ValueError: the shards of all ranks overlap, or are not the whole of a tensor.
        """
        plans, metadata = super().create_global_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():  # torch looks at this only where there are several ranks
            assert isinstance(tensor, TensorStorageMetadata)
            num_written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if num_written != tensor.size.numel():
                raise ValueError(f"{num_written} of {tensor.size.numel()} numbers of {name} would be written")
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
