"""What a weight sync is made of: where weights go, and what was sent, so that the receiver can be checked against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fuligo.formats.quantisation import EngineQuantisation

Transport = Literal["disk", "tensor", "gloo", "nccl"]


@dataclass(slots=True, frozen=True)
class EngineFormat:
    """How the tensors that engines take differ from those of the trainer's checkpoint. Experts are apart in both."""

    left_out: tuple[str, ...] = ()
    """How the names of tensors start that engines have no use for."""
    quantisation: EngineQuantisation | None = None
    """How the checkpoint is quantised that they started from; None: it is not."""


AS_CHECKPOINT = EngineFormat()


@dataclass(slots=True, frozen=True)
class EngineAddress:
    """An engine that weights are sent to."""

    url: str
    num_ranks: int = 1
    """Its tensor-parallel processes, each of which takes the weights."""
    start: int = 0
    """How often it was restarted: what an earlier start was sent is gone."""
    number: int | None = None
    """See `EngineClient`."""
    trainer_ranks: tuple[int, ...] = ()
    """tensor: the trainer's ranks on the GPUs of the engine's ranks, in their order; empty where it has GPUs of its own."""


@dataclass(slots=True, frozen=True)
class WeightTarget:
    """Where trainer ranks send their weights. Plain data: it travels to the ranks."""

    transport: Transport
    """disk: a Hugging Face checkpoint that the engines read; tensor: buckets in memory that both sides share; gloo, nccl: buckets broadcast
    in a process group of the sending rank and all ranks of the engines."""
    version: int
    """policy_version that the weights get."""
    bucket_bytes: int
    engines: tuple[EngineAddress, ...] = ()
    """disk: unused, the driver tells the engines to read."""
    directory: str = ""
    """disk: an empty directory."""
    changes_only: bool = False
    """Leave out tensors whose bytes are those of the previous send to the same engines."""
    with_checksum: bool = False
    """Compute the manifest's checksum; it reads every byte on the CPU."""


@dataclass(slots=True, frozen=True)
class WeightManifest:
    """What was sent."""

    version: int
    num_tensors: int
    num_bytes: int
    checksum: str | None
    """Of all names, shapes, types and bytes, independent of order (see `weights.checksum`); None where nobody compares it."""
    num_bytes_sent: int = 0
    """Less than `num_bytes` where only changes were sent."""


@dataclass(slots=True, frozen=True)
class Undelivered:
    """Engines did not take what was sent. A result, not an error: every rank has done its part, and can send again."""

    reason: str
    """Names the engines."""
