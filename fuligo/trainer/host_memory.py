"""Tensors of a device wait in host memory while somebody else uses the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

CHUNK_BYTES = 1 << 30
"""A power of two: torch rounds what it pins up to one."""


class HostMemory:
    """Takes the contents of tensors and gives them back. Its memory is allocated once, pinned where the tensors are on a GPU.

    The tensors stay what they are, on their device, with storage of no size meanwhile: views of them, sharded parameters, and what
    FSDP and optimizers keep of them are good again afterwards.

    Args:
        device: whose tensors are taken; others are passed over
    """

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._away: list[tuple[UntypedStorage, int]] = []
        """Storages without contents, and their sizes in bytes, in the order of their contents here."""
        self._dropped: list[tuple[UntypedStorage, int]] = []

    @property
    def num_bytes_away(self) -> int:
        return sum(size for _, size in self._away)

    @torch.no_grad()
    def take(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copy the contents and free the device's memory. Of tensors that share storage, and of sharded ones this rank's part, once.

        Args:
            dropped: their contents are not copied, they come back as zeros: buffers of gradients
        """
        assert not self._away and not self._dropped, "they are here already"
        self._away = [(storage, storage.nbytes()) for storage in self._storages(kept)]
        self._dropped = [(storage, storage.nbytes()) for storage in self._storages(dropped)]
        self._allocate(self.num_bytes_away)
        for theirs, ours in self._pieces():
            ours.copy_(theirs, non_blocking=True)
        self._finish()
        for storage, _ in (*self._away, *self._dropped):
            storage.resize_(0)

    @torch.no_grad()
    def give_back(self) -> None:
        """The contents to the tensors that they came from."""
        for storage, size in (*self._away, *self._dropped):
            storage.resize_(size)
        for theirs, ours in self._pieces():
            theirs.copy_(ours, non_blocking=True)
        for storage, _ in self._dropped:
            _as_bytes(storage).zero_()
        self._finish()
        self._away, self._dropped = [], []

    def _allocate(self, num_bytes: int) -> None:
        while len(self._chunks) * self._chunk_bytes < num_bytes:
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """[n] uint8 of a storage, and where they are in a chunk. The storages follow each other through the chunks."""
        at = 0
        for storage, size in self._away:
            whole = _as_bytes(storage)
            begin = 0
            while begin < size:
                number, offset = divmod(at, self._chunk_bytes)
                length = min(size - begin, self._chunk_bytes - offset)
                yield whole[begin : begin + length], self._chunks[number][offset : offset + length]
                begin, at = begin + length, at + length

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Each once, in order; empty ones are left out."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.nbytes() > 0 and storage.device.type == self._device.type:
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
