"""Export of a Megatron model with any layout to Hugging Face weights, gathered batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuligo.models.adapter_names import ExpertsFactor
from fuligo.models.names import ModelNames, Weight, with_expert
from fuligo.trainer.megatron_backend.weights.forms import join_experts, join_shards
from fuligo.trainer.megatron_backend.weights.local import RankGroups, misfits, rank_groups, tensors_of, unwrapped

Shapes = dict[str, tuple[int, ...]]

GATHER_BYTES = 64 * 2**20
"""Number of bytes gathered in one collective: enough to hide its latency, but far fewer than in a bucket of the weight sync."""
_ALIGNMENT_BYTES = 16
"""Alignment of tensors in a collective's buffer, so that each can be viewed in its data type."""


@torch.no_grad()
def named_weights(
    chunks: Sequence[nn.Module],
    names: ModelNames,
    *,
    dtype: torch.dtype,
    part_of: Callable[[str], Tensor] | None = None,
    gather_bytes: int = GATHER_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and full tensors of the Hugging Face checkpoint on every rank, each once and in the same order on all ranks.

    A collective: every rank must iterate to the end. A tensor may share the model's memory, so callers must neither change nor keep it. At
    most two batches of `gather_bytes` (or two copies of one larger tensor) are in memory at a time.

    Args:
        names: names of the model's weights, or of its adapter.
        dtype: data type of the tensors, except those that are always float32 (a router's expert bias).
        part_of: function that returns this rank's part of a weight by canonical name, called once for each; None: as in the stages.
    """
    groups, local = rank_groups(), tensors_of(chunks, names)
    assert not (different := misfits(local, names)), f"the model and the names of its checkpoint differ in {different[0]}"
    stages: list[Shapes] = [{} for _ in range(groups.pipeline.size())]
    shapes = {name: tuple(tensor.shape) for name, tensor in local.items()}
    dist.all_gather_object(stages, shapes, group=groups.pipeline)
    exchange = _Exchange(local.__getitem__ if part_of is None else part_of, groups, next(unwrapped(chunks[0]).parameters()).device)
    for batch in _batches(_items(stages, names, groups, dtype), gather_bytes):
        for item, shards in zip(batch, exchange.gather(batch), strict=True):
            if isinstance(item.weight, ExpertsFactor):
                yield from join_experts(item.weight, shards, groups.expert_tensor.size())
            else:
                yield from join_shards(item.weight, shards, names.architecture)


@dataclass(slots=True, frozen=True)
class _Owners:
    """Ranks that hold a weight."""

    stage: int
    """First pipeline rank that holds the weight."""
    expert_rank: int | None
    """Expert-parallel rank that holds the weight; None: the weight is not that of a single expert."""
    has_all_experts: bool = False
    """True if the weight covers all experts, so that the ranks that together hold all experts share it."""


@dataclass(slots=True, frozen=True)
class _Item:
    """Weight to gather, and its part on each owning rank."""

    weight: Weight
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_shards: int
    """Number of ranks with different parts of the weight; 1 if every owning rank has all of it."""
    owners: _Owners

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _items(stages: list[Shapes], names: ModelNames, groups: RankGroups, dtype: torch.dtype) -> Iterator[_Item]:
    """Yield all weights, in the same order on all ranks."""
    experts = names.architecture.experts
    per_rank = 0 if experts is None else experts.num_experts // groups.expert.size()
    num_mtp_layers = len({name.split(".")[2] for stage in stages for name in stage if name.startswith("mtp.layers.")})
    for weight in names.weights(num_mtp_layers):
        has_all_experts = isinstance(weight, ExpertsFactor)
        name, expert_rank, group = weight.megatron, None, groups.experts if has_all_experts else groups.tensor
        if weight.expert is not None:
            # `stages` contains only this rank's experts; those of other ranks have the stage and shape of this rank's at the same index.
            expert_rank, place = divmod(weight.expert, per_rank)
            name, group = with_expert(name, place + groups.expert.rank() * per_rank), groups.expert_tensor
        stage = next((rank for rank, shapes in enumerate(stages) if name in shapes), None)
        assert stage is not None, f"no pipeline stage has {name}"
        shape = stages[stage][name]
        num_shards = group.size() if weight.is_vocabulary or shape != weight.shape else 1
        yield _Item(weight, shape, torch.float32 if weight.is_float32 else dtype, num_shards, _Owners(stage, expert_rank, has_all_experts))


def _batches(items: Iterator[_Item], gather_bytes: int) -> Iterator[list[_Item]]:
    """Split into batches of consecutive items with the same owners and at most `gather_bytes` when gathered, or of one larger item."""
    batch: list[_Item] = []
    num_bytes = 0
    for item in items:
        size = item.num_bytes * item.num_shards
        if batch and (num_bytes + size > gather_bytes or item.owners != batch[0].owners):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size
    if batch:
        yield batch


class _Exchange:
    """Collectives over this rank's parts of the weights."""

    def __init__(self, part_of: Callable[[str], Tensor], groups: RankGroups, device: torch.device) -> None:
        self._part_of = part_of
        self._groups = groups
        self._device = device

    def gather(self, batch: Sequence[_Item]) -> list[list[Tensor]]:
        """Gather the parts of each item from its owners; every rank returns all parts of each item."""
        parts: dict[str, list[Tensor]] = {}
        for num_shards in sorted({item.num_shards for item in batch}):
            items = [item for item in batch if item.num_shards == num_shards]
            is_alone = self._groups.pipeline.size() == 1 and (items[0].owners.expert_rank is None or self._groups.expert.size() == 1)
            if num_shards == 1 and is_alone:  # no other rank needs this rank's part
                parts |= {item.weight.megatron: [self._part_of(item.weight.megatron).detach().to(item.dtype)] for item in items}
                continue
            buffer = _Buffer(items)
            shards = torch.empty(num_shards, buffer.num_bytes, dtype=torch.uint8, device=self._device)
            self._collect(items, buffer, shards)
            ranks = [buffer.tensors(shard) for shard in shards]
            parts |= {item.weight.megatron: list(tensors) for item, *tensors in zip(items, *ranks, strict=True)}
        return [parts[item.weight.megatron] for item in batch]

    def _collect(self, items: Sequence[_Item], buffer: _Buffer, shards: Tensor) -> None:
        """Fill `shards` [num_shards, num_bytes], first on the stage that holds the items, then on the other stages."""
        owners, groups = items[0].owners, self._groups
        if groups.pipeline.rank() == owners.stage:
            if owners.expert_rank is not None:
                self._collect_experts(items, buffer, shards, owners.expert_rank)
            elif len(shards) == 1:
                self._pack(items, buffer, shards[0])
            else:
                own = torch.empty_like(shards[0])
                self._pack(items, buffer, own)
                dist.all_gather_into_tensor(shards.view(-1), own, group=groups.experts if owners.has_all_experts else groups.tensor)
        if groups.pipeline.size() > 1:
            dist.broadcast(shards, group=groups.pipeline, group_src=owners.stage)

    def _collect_experts(self, items: Sequence[_Item], buffer: _Buffer, shards: Tensor, expert_rank: int) -> None:
        """Broadcast from one expert-parallel rank, because gathering from all at once would need memory for one expert per rank."""
        groups = self._groups
        if groups.expert.rank() == expert_rank:
            self._pack(items, buffer, shards[groups.expert_tensor.rank() if len(shards) > 1 else 0])
        for number, shard in enumerate(shards):
            dist.broadcast(shard, group=groups.experts, group_src=expert_rank * groups.expert_tensor.size() + number)

    def _pack(self, items: Sequence[_Item], buffer: _Buffer, content: Tensor) -> None:
        for item, tensor in zip(items, buffer.tensors(content), strict=True):
            tensor.copy_(self._part_of(item.weight.megatron))


class _Buffer:
    """Layout of tensors with several data types in one byte buffer."""

    def __init__(self, items: Sequence[_Item]) -> None:
        self._items = items
        self._starts: list[int] = []
        self.num_bytes = 0
        for item in items:
            self._starts.append(self.num_bytes)
            self.num_bytes += -(-item.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def tensors(self, content: Tensor) -> list[Tensor]:
        """Return the tensors as views of the buffer `content` [num_bytes]."""
        return [
            content[start : start + item.num_bytes].view(item.dtype).view(item.shape)
            for item, start in zip(self._items, self._starts, strict=True)
        ]
