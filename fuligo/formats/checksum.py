"""Checksum of a set of named tensors, computed identically by trainer and engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 16


class WeightsDigest(NamedTuple):
    """Digest of all names, dtypes, shapes and bytes; independent of the order of the tensors."""

    num_tensors: int
    num_bytes: int
    checksum: str
    """32 hex digits: the sum modulo 2^128 of the tensors' BLAKE2b digests."""


class WeightsChecksum:
    """Incremental digest that takes one tensor at a time, so the whole model never has to be in memory."""

    def __init__(self) -> None:
        self._num_tensors = self._num_bytes = self._sum = 0

    def update(self, name: str, tensor: torch.Tensor) -> None:
        self._num_tensors += 1
        self._num_bytes += tensor.nbytes
        self._sum += int.from_bytes(tensor_digest(name, tensor), "big")

    def result(self) -> WeightsDigest:
        return WeightsDigest(self._num_tensors, self._num_bytes, f"{self._sum % 2 ** (8 * DIGEST_BYTES):0{2 * DIGEST_BYTES}x}")


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """Return the BLAKE2b digest of a tensor's name, dtype, shape and bytes."""
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()  # as bytes: numpy has no bfloat16
    digest = hashlib.blake2b(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode(), digest_size=DIGEST_BYTES)
    digest.update(raw.numpy().data)
    return digest.digest()


def weights_checksum(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightsDigest:
    """Return the digest of all tensors."""
    checksum = WeightsChecksum()
    for name, tensor in named_tensors:
        checksum.update(name, tensor)
    return checksum.result()
