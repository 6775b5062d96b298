"""The weights of a Megatron model of any layout as those of a Hugging Face checkpoint, gathered batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fuligo.models.names import ModelNames, Weight, with_expert
from fuligo.trainer.megatron_backend.weights.forms import join_shards
from fuligo.trainer.megatron_backend.weights.groups import RankGroups, rank_groups
from fuligo.trainer.megatron_backend.weights.local import local_weights

Shapes = dict[str, tuple[int, ...]]

GATHER_BYTES = 64 * 2**20
"""Gathered in one collective: enough for its latency not to count, little beside the buckets that engines are sent."""
_ALIGNMENT_BYTES = 16
"""Of tensors within a collective's buffer, so that each can be viewed in its own type."""


@torch.no_grad()
def named_weights(
    chunks: Sequence[nn.Module], names: ModelNames, *, dtype: torch.dtype, gather_bytes: int = GATHER_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors as in the checkpoint, on every rank; each once, the same order everywhere.

    A collective: every rank iterates to the end. A tensor may be the model's own memory: whoever takes it neither changes nor keeps it.
    Beside what the caller keeps, at most two batches of `gather_bytes` exist (or one larger tensor, twice).

    Args:
        chunks: this rank's stages, bare or wrapped.
        dtype: of the tensors, but for those that are float32 always (the bias of a router's scores).
    """
    groups, local = rank_groups(), local_weights(chunks)
    stages = _gather_objects({name: tuple(tensor.shape) for name, tensor in local.items()}, groups.pipeline)
    exchange = _Exchange({name: tensor.detach() for name, tensor in local.items()}, groups)
    for batch in _batches(_items(stages, names, groups, dtype), gather_bytes):
        for item, shards in zip(batch, exchange.gather(batch), strict=True):
            for weight, parts in zip(item.weights, item.apart(shards), strict=True):
                yield from join_shards(weight, parts, names.architecture)


@dataclass(slots=True, frozen=True)
class _Item:
    """What ranks in the same place have of a weight; of experts, each expert-parallel rank has another one there."""

    weights: tuple[Weight, ...]
    """One; of experts one for each expert-parallel rank."""
    name: str
    """Of this rank's."""
    shape: tuple[int, ...]
    """Of a rank's part."""
    dtype: torch.dtype
    stage: int
    """The first pipeline rank that has it."""
    group: ProcessGroup | None
    """Those ranks of a stage that have all of it between them; None: each has all of it."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def num_shards(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def is_expert(self) -> bool:
        return self.weights[0].expert is not None

    def apart(self, shards: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """For each weight its parts. Ranks of the group of both are numbered by expert-tensor-parallel rank first."""
        per_weight = len(shards) // len(self.weights)
        return [shards[start : start + per_weight] for start in range(0, len(shards), per_weight)]


def _items(stages: list[Shapes], names: ModelNames, groups: RankGroups, dtype: torch.dtype) -> Iterator[_Item]:
    """All weights in the order of `names`: the same on all ranks but for the expert's number in `name`."""
    experts = names.architecture.experts
    per_rank = 0 if experts is None else experts.num_experts // groups.expert.size()
    num_mtp_layers = len({name.split(".")[2] for stage in stages for name in stage if name.startswith("mtp.layers.")})
    for weight in names.weights(num_mtp_layers):
        weights, name, group = (weight,), weight.megatron, groups.tensor
        if weight.expert is not None:
            if weight.expert >= per_rank:
                continue
            same_place = range(weight.expert, weight.expert + per_rank * groups.expert.size(), per_rank)
            weights = tuple(names.by_megatron_name[with_expert(name, expert)] for expert in same_place)
            name, group = weights[groups.expert.rank()].megatron, groups.experts
        stage = next((rank for rank, shapes in enumerate(stages) if name in shapes), None)
        assert stage is not None, f"no pipeline stage has {name}"
        shape = stages[stage][name]
        is_shared = weight.expert is not None or weight.is_vocabulary or shape != weight.shape
        kept = torch.float32 if weight.is_float32 else dtype
        yield _Item(weights, name, shape, kept, stage, group if is_shared else None)


def _batches(items: Iterator[_Item], gather_bytes: int) -> Iterator[list[_Item]]:
    """Consecutive items of one stage that fill `gather_bytes` when gathered, experts apart from others; a larger item is on its own."""
    batch: list[_Item] = []
    num_bytes = 0
    for item in items:
        size = item.num_bytes * item.num_shards
        if batch and (num_bytes + size > gather_bytes or (item.stage, item.is_expert) != (batch[0].stage, batch[0].is_expert)):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size
    if batch:
        yield batch


class _Exchange:
    """Collectives over this rank's parts of the weights."""

    def __init__(self, local: Mapping[str, Tensor], groups: RankGroups) -> None:
        self._local = local
        self._pipeline = groups.pipeline
        self._device = next(iter(local.values())).device

    def gather(self, batch: Sequence[_Item]) -> list[list[Tensor]]:
        """The parts of each item, on all ranks of all stages: one of each rank of its group."""
        found: dict[str, list[Tensor]] = {}
        for group, items in _by_group(batch):
            num_ranks = 1 if group is None else group.size()
            if num_ranks == self._pipeline.size() == 1:
                found |= {item.name: [self._local[item.name].to(item.dtype)] for item in items}
                continue
            buffer = _Buffer(items)
            content = self._empty(num_ranks * buffer.num_bytes)
            if self._pipeline.rank() == items[0].stage:
                own = content if num_ranks == 1 else self._empty(buffer.num_bytes)
                for item, tensor in zip(items, buffer.tensors(own), strict=True):
                    tensor.copy_(self._local[item.name])
                if num_ranks > 1:
                    dist.all_gather_into_tensor(content, own, group=group)
            if self._pipeline.size() > 1:
                dist.broadcast(content, group=self._pipeline, group_src=items[0].stage)
            ranks = [buffer.tensors(part) for part in content.chunk(num_ranks)]
            found |= {item.name: list(parts) for item, *parts in zip(items, *ranks, strict=True)}
        return [found[item.name] for item in batch]

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _by_group(batch: Sequence[_Item]) -> Iterator[tuple[ProcessGroup | None, list[_Item]]]:
    """Items whose parts are gathered, and those that every rank has."""
    for is_shared in (True, False):
        items = [item for item in batch if (item.group is not None) == is_shared]
        if items:
            yield items[0].group, items


class _Buffer:
    """Where tensors of several types lie in one run of bytes."""

    def __init__(self, items: Sequence[_Item]) -> None:
        self._items = items
        self._starts: list[int] = []
        self.num_bytes = 0
        for item in items:
            self._starts.append(self.num_bytes)
            self.num_bytes += -(-item.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def tensors(self, content: Tensor) -> list[Tensor]:
        """Views of `content` [num_bytes]."""
        return [
            content[start : start + item.num_bytes].view(item.dtype).view(item.shape)
            for item, start in zip(self._items, self._starts, strict=True)
        ]


def _gather_objects(value: Shapes, group: ProcessGroup) -> list[Shapes]:
    values: list[Shapes | None] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return [value for value in values if value is not None]
