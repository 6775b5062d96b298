"""Types of a weight sync: format of the engines' tensors, target, manifest, and the checksum that sender and engines compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xxhash import xxh3_128

from fuligo.formats.engine_keys import NO_KEYS, EngineKeys
from fuligo.formats.host_copies import batches, host_copies
from fuligo.formats.quantization import EngineQuantization
from fuligo.formats.stored_experts import StoredExperts

if TYPE_CHECKING:
    from asyncio import Future

    import torch

    from fuligo.formats.host_copies import NamedTensors

DIGEST_SCHEME = "xxh3:"
"""Prefix of checksums. Versions of fuligo that used BLAKE2b wrote none."""
DIGESTED_AT_ONCE = 2**28
"""Number of bytes of tensors that are copied from a GPU in one batch."""


class WeightsDigest(NamedTuple):
    """Digest of the names, dtypes, shapes and bytes of tensors, independent of their order."""

    num_tensors: int
    num_bytes: int
    checksum: str
    """`DIGEST_SCHEME` and 32 hex digits: the sum modulo 2^128 of the tensors' digests."""


class WeightsChecksum:
    """Incremental digest that takes one tensor at a time, so the whole model never has to be in memory."""

    def __init__(self) -> None:
        self._num_tensors = self._num_bytes = self._sum = 0

    def update(self, name: str, tensor: torch.Tensor) -> None:
        self._num_tensors += 1
        self._num_bytes += tensor.nbytes
        self._sum += tensor_digest(name, tensor)

    def result(self) -> WeightsDigest:
        return WeightsDigest(self._num_tensors, self._num_bytes, f"{DIGEST_SCHEME}{self._sum % 2**128:032x}")


def tensor_digest(name: str, tensor: torch.Tensor) -> int:
    """Return the 128-bit digest of a tensor's name, dtype, shape and bytes.

    XXH3 (https://xxhash.com) detects failed transfers, not forged weights; a cryptographic hash would take ten times as long.
    """
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()  # as bytes: numpy has no bfloat16
    digest = xxh3_128(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(raw.numpy().data)
    return digest.intdigest()


def weights_checksum(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightsDigest:
    """Return the digest of all tensors. At most `DIGESTED_AT_ONCE` bytes and one more tensor are held at a time."""
    checksum = WeightsChecksum()

    def update_all(batch: NamedTensors) -> None:
        """Digest a batch. A separate function, so that its references to the batch's copies are dropped when it returns."""
        for name, tensor in host_copies(batch):
            checksum.update(name, tensor)

    for batch in batches(named_tensors, DIGESTED_AT_ONCE):
        update_all(batch)
    return checksum.result()


Transport = Literal["disk", "tensor", "gloo", "nccl"]


@dataclass(slots=True, frozen=True)
class EngineFormat:
    """Format of the tensors that engines receive, where it differs from that of the trainer's model."""

    left_out: tuple[str, ...] = ()
    """Name prefixes of tensors that engines do not use."""
    quantization: EngineQuantization | None = None
    """Quantization of the engines' checkpoint; None if it is not quantized."""
    experts: StoredExperts = StoredExperts.APART
    """Layout of routed experts in the engines."""


AS_CHECKPOINT = EngineFormat()


@dataclass(slots=True, frozen=True)
class EngineAddress:
    """Engine that receives weights."""

    url: str
    num_ranks: int = 1
    """Number of tensor-parallel processes of the engine, each of which receives the weights."""
    start: int = 0
    """Number of restarts; a restarted engine has lost the weights that it received before."""
    number: int | None = None
    """Index among the engines of the run (see `InferenceEngine`); None if it has none."""
    keys: EngineKeys = NO_KEYS
    trainer_ranks: tuple[int, ...] = ()
    """tensor transport: for each rank of the engine, the trainer rank on the same GPU; empty if no GPU is shared."""
    run: str | None = None
    """Name of the run, if several runs share the engine; see `InferenceEngine`."""


@dataclass(slots=True, frozen=True)
class WeightTarget:
    """Destination of a weight sync, as plain data that can be sent to the trainer ranks."""

    transport: Transport
    """disk: a Hugging Face checkpoint that the engines read; tensor: buckets in shared memory; gloo, nccl: buckets broadcast in a process
    group of the sending rank and all engine ranks."""
    version: int
    bucket_bytes: int
    engines: tuple[EngineAddress, ...] = ()
    """Receiving engines; unused with disk, where the driver tells the engines to read."""
    directory: str = ""
    """disk: directory to write to, which already has the model's JSON files."""
    changes_only: bool = False
    """True to skip tensors whose bytes are unchanged since the previous sync to the same engines."""
    with_checksum: bool = False
    """True to compute the manifest's checksum, which reads every byte on the CPU."""


@dataclass(slots=True, frozen=True)
class MergeRounding:
    """Number of elements of adapted matrices that a merged adapter changed, after rounding to the data type of the result."""

    num_changed: int = 0
    num_elements: int = 0
    """Number of elements of the adapted matrices; 0 if nothing was rounded."""

    def __add__(self, other: MergeRounding) -> MergeRounding:
        return MergeRounding(self.num_changed + other.num_changed, self.num_elements + other.num_elements)

    @property
    def share_changed(self) -> float:
        return self.num_changed / self.num_elements if self.num_elements else 1.0


@dataclass(slots=True, frozen=True)
class WeightManifest:
    """Summary of a weight sync, to check that engines received the weights."""

    version: int
    num_tensors: int
    num_bytes: int
    checksum: str | None
    """Checksum of all tensors (see `WeightsDigest`); None unless `WeightTarget.with_checksum`."""
    num_bytes_sent: int = 0
    """Number of bytes that were sent; less than `num_bytes` if only changes were sent."""
    merged: MergeRounding = MergeRounding()
    """Elements that a merged adapter changed, after rounding."""
    adapter: str | None = None
    """Digest of an adapter that was sent unmerged, for comparison with the digest that an engine reports; None if none was."""
    trained: WeightsDigest | None = None
    """Digest of the adapter that was sent or merged, in the data type of the sync; None without one."""
    unconfirmed: tuple[str, ...] = ()
    """URLs of engines with several ranks that answered for their first rank only: another may have failed to load the weights."""


@dataclass(slots=True, frozen=True)
class Undelivered:
    """Result of a sync that failed on an engine. Not an exception: every rank completed its part and can send again."""

    reason: str


@dataclass(slots=True, frozen=True)
class AdapterPayload:
    """LoRA adapter for engines that load adapters by name; its parts are computed while engines unload the previous adapter."""

    config: dict[str, Any]
    """Fields of PEFT's adapter_config.json that the engine reads."""
    tensors: Future[str]
    """Payload of `payload.SharedCopies`, of the tensors by their names in PEFT's files."""
    digest: Future[str]
    """Digest of the tensors, as `WeightManifest.adapter`."""
