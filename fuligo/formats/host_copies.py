"""Casts and copies to host memory that handle many small tensors in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    NamedTensors = Sequence[tuple[str, torch.Tensor]]

MOST_PINNED_BYTES = 2**28
"""Largest copy to pinned memory; larger copies go to pageable memory, so that little pinned memory is held."""
CAST_TOGETHER_BYTES = 2**28
"""Number of bytes of tensors that are cast in one call."""


def host_copies(named_tensors: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in host memory, in the same order; tensors that are already there are not copied.

    Each transfer waits for the device, and an adapter has hundreds of tensors, so tensors of one data type are copied together.
    """
    names = [name for name, _ in named_tensors]
    tensors = [tensor.detach() for _, tensor in named_tensors]
    away: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            away.setdefault((tensor.device, tensor.dtype), []).append(position)
    for positions in away.values():
        for position, copy in zip(positions, joined_copies([tensors[position] for position in positions]), strict=True):
            tensors[position] = copy
    return list(zip(names, tensors, strict=True))


def joined_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies in host memory of tensors that share a data type and device, as views of one tensor.

    Small copies from a GPU go to pinned memory, which is several times as fast as pageable memory; torch keeps it for later copies.
    """
    import torch

    away = torch.cat([tensor.reshape(-1) for tensor in tensors])
    joined = torch.empty_like(away, device="cpu", pin_memory=away.is_cuda and away.nbytes <= MOST_PINNED_BYTES).copy_(away)
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def batches(named_tensors: Iterable[tuple[str, torch.Tensor]], num_bytes: int) -> Iterator[NamedTensors]:
    """Group consecutive tensors into batches of at least `num_bytes`; the last may be smaller or empty.

    The same list is yielded each time; it is cleared when the next batch is requested.
    """
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        batch.append((name, tensor))
        size += tensor.nbytes
        if size >= num_bytes:
            yield batch
            batch.clear()
            size = 0
    yield batch


def cast_together(named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, which must share a data type and device, cast to `dtype`. About `CAST_TOGETHER_BYTES` are held at a time."""
    for batch in batches(named_tensors, CAST_TOGETHER_BYTES):
        if batch:
            yield from _cast(batch, dtype)


def _cast(batch: NamedTensors, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    joined = torch.cat([tensor.detach().reshape(-1) for _, tensor in batch]).to(dtype)
    for (name, tensor), part in zip(batch, joined.split([tensor.numel() for _, tensor in batch]), strict=True):
        yield name, part.view(tensor.shape)
