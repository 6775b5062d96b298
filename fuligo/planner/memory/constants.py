"""Memory that no formula gives: each figure with where it comes from."""

from __future__ import annotations

from fuligo.planner.gpus import GIB, MIB

CUDA_CONTEXT_BYTES = 600 * MIB
"""Of one process that has run a matrix product: CUDA's context, loaded kernels and cuBLAS's workspace."""
COMMUNICATOR_BYTES = 256 * MIB
"""Of one NCCL communicator of several ranks: 4 MiB (NCCL_BUFFSIZE, NCCL's documentation) for each of up to 32 channels, both ways."""
DEEPEP_BYTES = 2 * GIB
"""Buffers of DeepEP in one process: what SGLang 0.5.15 sets aside for it (`server_args._handle_gpu_memory_settings`)."""
FRAGMENTATION = 0.1
"""Of the memory that comes and goes with every micro-batch: PyTorch's allocator holds blocks of 2 MiB and more, which packed rows of ever
new lengths never fill (without expandable segments it can be far more: GMLake, arXiv 2401.08156, measures up to a third)."""


def amount(num_bytes: float) -> str:
    """For notes: `12.3 GiB`, `256 MiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def billions(count: float) -> str:
    """For notes: `5.43 B`."""
    return f"{count / 1e9:.2f} B"
