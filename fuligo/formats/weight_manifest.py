"""Types of a weight sync: the engines' format, where weights go, and what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fuligo.formats.engine_keys import NO_KEYS, EngineKeys
from fuligo.formats.quantisation import EngineQuantisation

Transport = Literal["disk", "tensor", "gloo", "nccl"]


@dataclass(slots=True, frozen=True)
class EngineFormat:
    """Difference between the engines' tensors and those of the trainer's checkpoint; experts are unfused in both."""

    left_out: tuple[str, ...] = ()
    """Name prefixes of tensors that engines do not use."""
    quantisation: EngineQuantisation | None = None
    """Quantisation of the engines' checkpoint; None if it is not quantised."""


AS_CHECKPOINT = EngineFormat()


@dataclass(slots=True, frozen=True)
class EngineAddress:
    """Engine that receives weights."""

    url: str
    num_ranks: int = 1
    """Tensor-parallel processes of the engine, each of which receives the weights."""
    start: int = 0
    """Number of restarts; a restarted engine has lost what it received before."""
    number: int | None = None
    """Index among the engines of the run; see `InferenceEngine`."""
    keys: EngineKeys = NO_KEYS
    trainer_ranks: tuple[int, ...] = ()
    """tensor transport: trainer ranks on the GPUs of the engine's ranks, in order; empty if the engine has its own GPUs."""


@dataclass(slots=True, frozen=True)
class WeightTarget:
    """Destination of a weight sync; plain data that is passed to the trainer ranks."""

    transport: Transport
    """disk: a Hugging Face checkpoint that the engines read; tensor: buckets in shared memory; gloo, nccl: buckets broadcast in a process
    group of the sending rank and all engine ranks."""
    version: int
    """policy_version of the weights."""
    bucket_bytes: int
    engines: tuple[EngineAddress, ...] = ()
    """Receiving engines; unused with disk, where the driver tells the engines to read."""
    directory: str = ""
    """disk: an empty directory to write to."""
    changes_only: bool = False
    """Skip tensors whose bytes are unchanged since the previous sync to the same engines."""
    with_checksum: bool = False
    """Compute the manifest's checksum, which reads every byte on the CPU."""


@dataclass(slots=True, frozen=True)
class WeightManifest:
    """Summary of what was sent, for checking the receiver."""

    version: int
    num_tensors: int
    num_bytes: int
    checksum: str | None
    """Order-independent digest of all names, shapes, dtypes and bytes (see `formats.checksum`); None if it is not compared."""
    num_bytes_sent: int = 0
    """Bytes actually sent; less than `num_bytes` if only changes were sent."""


@dataclass(slots=True, frozen=True)
class Undelivered:
    """Result of a sync that engines refused. Not an exception: every rank completed its part and can send again."""

    reason: str
    """Reason, naming the engines."""
