"""The GPUs that the planner knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of one GPU model (source: the maker's data sheet, named beside each entry)."""

    name: str
    """As `--gpu` takes it: `h100-80`."""
    memory_bytes: int
    bf16_flops: float
    """Dense matrix operations a second."""
    fp8_flops: float
    """The same in FP8; equal to `bf16_flops` where the GPU has no FP8."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To another GPU of the node, one direction (NVLink, or PCIe where there is none)."""
    network_bytes_per_s: float
    """To a GPU of another node, one direction."""
    host_bytes_per_s: float
    """To the host's memory, one direction."""
