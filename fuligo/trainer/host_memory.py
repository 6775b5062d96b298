"""Host memory that holds a device's tensors while another process uses the device."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

CHUNK_BYTES = 1 << 30
"""Size of a host allocation in bytes; a power of two, because torch rounds the size of pinned allocations up to a power of two."""


class HostMemory:
    """Host buffer for the contents of a device's tensors, allocated once, pinned if the device is a GPU.

    Between `take` and `give_back`, the tensors remain on their device with storage of size 0, so views, sharded parameters, and references
    held by FSDP and optimizers are valid again afterwards.

    Args:
        device: device whose tensors are moved; tensors on other devices are skipped.
        chunk_bytes: size of one host allocation.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._away: list[tuple[UntypedStorage, int]] = []
        """Emptied storages and their sizes in bytes, in the order of their contents in the chunks."""
        self._dropped: list[tuple[UntypedStorage, int]] = []

    @property
    def num_bytes_away(self) -> int:
        return sum(size for _, size in self._away)

    @torch.no_grad()
    def take(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copy the contents of `kept` to the host and free their storage on the device. Storage that tensors share is copied once.

        For a DTensor, this is the storage of its local shard. Tensors in `dropped`, such as gradient buffers, are freed without a copy;
        `give_back` restores them as zeros.
        """
        assert not self._away and not self._dropped, "the contents were taken already"
        self._away = [(storage, storage.nbytes()) for storage in self._storages(kept)]
        self._dropped = [(storage, storage.nbytes()) for storage in self._storages(dropped)]
        while len(self._chunks) * self._chunk_bytes < self.num_bytes_away:
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))
        for theirs, ours in self._pieces():
            ours.copy_(theirs, non_blocking=True)
        self._finish()
        for storage, _ in (*self._away, *self._dropped):
            storage.resize_(0)

    @torch.no_grad()
    def give_back(self) -> None:
        """Restore the storage of all tensors, with the contents of `kept` and zeros in `dropped`."""
        for storage, size in (*self._away, *self._dropped):
            storage.resize_(size)
        for theirs, ours in self._pieces():
            theirs.copy_(ours, non_blocking=True)
        for storage, _ in self._dropped:
            _as_bytes(storage).zero_()
        self._finish()
        self._away, self._dropped = [], []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of [n] uint8 views: a piece of a storage, and its place in a chunk. Chunks hold the storages one after another."""
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
        """Return each storage once, in order, without empty ones."""
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
