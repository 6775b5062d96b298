"""Conversion between the tensors of a Hugging Face checkpoint and a rank's parts of Megatron's weights."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fuligo.models.adapter_names import ExpertsFactor
from fuligo.models.architecture import Architecture, GroupedAttention
from fuligo.models.names import Form, Weight
from fuligo.trainer.megatron_backend.weights.stored import StoredPart


def read_pieces(weight: Weight, stored: Sequence[StoredPart], architecture: Architecture, index: int, count: int) -> list[Tensor]:
    """Read the `index`-th of `count` equal parts of a weight, in Megatron's layout, as pieces to concatenate. Only that part is read.

    Args:
        stored: tensors of the checkpoint, as listed in `Weight.checkpoint`; gate and up projection separately even if they are stored as
            one.
        count: number of parts; 1 if every rank has the whole weight.
    """
    axis = weight.axis or 0
    start, stop = index * weight.shape[axis] // count, (index + 1) * weight.shape[axis] // count
    match weight.form:
        case Form.WHOLE:
            return [stored[0].read(axis, start, stop)]
        case Form.GATE_UP:
            return [part.read(0, start // 2, stop // 2) for part in stored]
        case Form.SWAPPED_HALVES:
            return [_swap_halves(stored[0].read(0, start, stop))]
        case Form.QKV:
            return [_read_qkv(stored, qkv_group_sizes(architecture), start, stop)]


def read_shard(weight: Weight, stored: Sequence[StoredPart], architecture: Architecture, index: int, count: int) -> Tensor:
    return _cat(read_pieces(weight, stored, architecture, index, count))


def join_shards(weight: Weight, shards: Sequence[Tensor], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors of a weight, joined from the parts of all TP ranks (one part if every rank has the whole weight)."""
    match weight.form:
        case Form.WHOLE:
            tensors = [_cat(shards, weight.axis or 0).narrow(0, 0, weight.shape[0])]
        case Form.GATE_UP:
            halves = [shard.chunk(2) for shard in shards]
            gates, ups = [gate for gate, _ in halves], [up for _, up in halves]
            tensors = [_cat(gates), _cat(ups)] if len(weight.checkpoint) == 2 else [_cat(gates + ups)]
        case Form.SWAPPED_HALVES:
            tensors = [_swap_halves(_cat(shards))]
        case Form.QKV:
            tensors = _split_qkv(shards, qkv_group_sizes(architecture))
    yield from zip(weight.checkpoint, tensors, strict=True)


def experts_from_peft(factor: ExpertsFactor, tensor: Tensor) -> Tensor:
    """Return A or B of all experts, stacked by expert, from the tensor of a PEFT file."""
    if factor.factor == "A":
        return tensor
    return tensor.unflatten(1, (-1, factor.num_experts)).permute(2, 0, 1).flatten(0, 1)


def join_experts(factor: ExpertsFactor, shards: Sequence[Tensor], num_sharing: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor of a PEFT file, joined from the parts of all ranks that together hold all experts (one part if all hold it whole).

    Args:
        num_sharing: number of ranks that share each expert; their parts are adjacent in `shards`.
    """
    num_sharing = min(num_sharing, len(shards))
    num_local = factor.num_experts * num_sharing // len(shards)
    stacked = [shard.unflatten(0, (num_local, -1)) for shard in shards]
    ranks = [stacked[first : first + num_sharing] for first in range(0, len(shards), num_sharing)]
    if factor.axis is None:
        joined = [copies[0] for copies in ranks]
    elif factor.form is Form.GATE_UP:
        halves = [[part.chunk(2, dim=1) for part in parts] for parts in ranks]
        joined = [torch.cat([gate for gate, _ in parts] + [up for _, up in parts], dim=1) for parts in halves]
    else:
        joined = [_cat(parts, factor.axis + 1) for parts in ranks]
    experts = _cat(joined)
    tensor = experts.flatten(0, 1) if factor.factor == "A" else experts.permute(1, 2, 0).flatten(1)
    yield factor.checkpoint[0], tensor


def _cat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), axis)


def _swap_halves(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)


def qkv_group_sizes(architecture: Architecture) -> tuple[int, int, int]:
    """Return the numbers of query, key and value rows in one group of Megatron's QKV matrix: the query heads that share a key head."""
    heads = architecture.attention
    assert isinstance(heads, GroupedAttention)
    return heads.num_heads // heads.num_kv_heads * heads.head_dim, heads.head_dim, heads.head_dim


def _read_qkv(stored: Sequence[StoredPart], sizes: tuple[int, int, int], start: int, stop: int) -> Tensor:
    """Read rows `start` to `stop` of Megatron's QKV matrix; a part of a group if there are more ranks than groups.

    See megatron/core/transformer/attention.py.
    """
    group_rows = sum(sizes)
    first, last = start // group_rows, -(-stop // group_rows)
    parts = [part.read(0, first * rows, last * rows).unflatten(0, (last - first, rows)) for part, rows in zip(stored, sizes, strict=True)]
    return torch.cat(parts, dim=1).flatten(0, 1)[start - first * group_rows : stop - first * group_rows]


def _split_qkv(shards: Sequence[Tensor], sizes: tuple[int, int, int]) -> list[Tensor]:
    if shards[0].shape[0] % sum(sizes):
        shards = [torch.cat(list(shards))]
    groups = [shard.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1) for shard in shards]
    return [torch.cat(parts).flatten(0, 1) for parts in zip(*groups, strict=True)]
