"""Buckets of named tensors: a stream of tensors is split by size and counted; the next bucket is gathered while one is sent."""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fuligo.formats.weight_manifest import WeightManifest, WeightsChecksum, tensor_digest

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]


def cut_into_buckets(named_weights: NamedTensors, bucket_bytes: int) -> Iterator[Bucket]:
    """Group consecutive tensors into buckets of at most `bucket_bytes`.

    Only a bucket of a single tensor, or of tensors that must be sent in one call, may be larger.
    """
    bucket: Bucket = []
    size = 0
    for unit in _units(named_weights):
        unit_size = sum(tensor.nbytes for _, tensor in unit)
        if bucket and size + unit_size > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket += unit
        size += unit_size
    if bucket:
        yield bucket


_LATENT_ATTENTION = re.compile(r"(.*\.self_attn)\.(?:(?:q_a|q_b|kv_a|kv_b)_|indexer\.wk\.)")
"""Pattern of the latent-attention tensors that must be sent together, for each layer. SGLang 0.5.15.post1 fuses `q_a_proj` and
`kv_a_proj_with_mqa` if a call contains both, and drops one that arrives alone; the same holds for the FP8 values and scales of an indexer's
`wk` (models/deepseek_common/deepseek_weight_loader.py)."""


def _units(named_weights: NamedTensors) -> Iterator[Bucket]:
    """Yield the tensors that must be sent together: the latent-attention projections of a layer, or a single other tensor."""
    unit: Bucket = []
    unit_layer: str | None = None
    for name, tensor in named_weights:
        match = _LATENT_ATTENTION.match(name)
        layer = match[1] if match else None
        if unit and layer != unit_layer:
            yield unit
            unit = []
        unit_layer = layer
        if layer is None:
            yield [(name, tensor)]
        else:
            unit.append((name, tensor))
    if unit:
        yield unit


def send_each(buckets: Iterator[Bucket], send: Callable[[Bucket, bool], None]) -> None:
    """Call `send(bucket, is_last)` for each bucket in order, in a thread, while later ones are gathered.

    At most three buckets exist at a time: one is sent, one waits, and one is gathered.

    The calling thread gathers every bucket even after a send failed, because gathering is a collective of all ranks. The error of the
    failed send is raised at the end.
    """
    sending: Future[None] | None = None
    error: BaseException | None = None
    with ThreadPoolExecutor(1, "weights") as thread:
        bucket = next(buckets, None)
        while bucket is not None:
            following = next(buckets, None)
            if sending is not None and error is None:
                error = sending.exception()
            if error is None:
                sending = thread.submit(send, bucket, following is None)
            bucket = following
    if error is None and sending is not None:
        error = sending.exception()
    if error is not None:
        raise error


class Changes:
    """Digests of the tensors that were sent last (16 bytes each), to select the tensors that have changed since."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}

    def forget(self) -> None:
        """Treat the next send as the first, after a failed send or for other engines."""
        self._digests.clear()

    def only(self, named_weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that changed, together with those that must be sent with them.

        Yield the last tensors of the stream if nothing changed: a send carries the new version and cannot be empty.
        """
        unit: Bucket = []
        changed = False
        for unit in _units(named_weights):
            digests = {name: tensor_digest(name, tensor) for name, tensor in unit}
            if any(self._digests.get(name) != digest for name, digest in digests.items()):
                self._digests |= digests
                changed = True
                yield from unit
        if unit and not changed:
            yield from unit


class Counted:
    """Counter of the tensors and bytes of a weight sync."""

    def __init__(self, *, with_checksum: bool) -> None:
        self._checksum = WeightsChecksum() if with_checksum else None
        self._num_tensors = self._num_bytes = self._num_bytes_sent = 0

    def observe(self, named_weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights unchanged, and count them as they pass."""
        for name, tensor in named_weights:
            self._num_tensors += 1
            self._num_bytes += tensor.nbytes
            if self._checksum is not None:
                self._checksum.update(name, tensor)
            yield name, tensor

    def observe_sent(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets unchanged, and count the bytes that are sent as they pass."""
        for bucket in buckets:
            self._num_bytes_sent += sum(tensor.nbytes for _, tensor in bucket)
            yield bucket

    def manifest(self, version: int) -> WeightManifest:
        """Return the summary of the sync. Call it when all weights have passed."""
        digest = None if self._checksum is None else self._checksum.result().checksum
        return WeightManifest(version, self._num_tensors, self._num_bytes, digest, self._num_bytes_sent)


def packed(bucket: Bucket) -> torch.Tensor:
    """Return the bytes of all tensors of a bucket, [nbytes] uint8 on their device."""
    tensors = [tensor.detach().reshape(-1) for _, tensor in bucket]
    if all(tensor.nbytes % 8 == tensor.storage_offset() * tensor.itemsize % 8 == 0 for tensor in tensors):  # copied faster than bytes
        return torch.cat([tensor.view(torch.int64) for tensor in tensors]).view(torch.uint8)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as [nbytes] uint8 on its device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
