"""Memory that no formula gives: each figure with where it comes from."""

from __future__ import annotations

from fuligo.planner.gpus import GIB, MIB

CUDA_CONTEXT_BYTES = 700 * MIB
"""Of one process that trains: CUDA's context (617 MiB), cuBLAS's workspace (64 MiB) and loaded kernels (16 MiB), measured with PyTorch
2.11 and CUDA 13.0 on an H200."""
COLLECTIVE_BYTES = 484 * MIB
"""Of one NCCL communicator that reduces or gathers, measured there on two GPUs linked by NVLink, multicast off."""
POINT_TO_POINT_BYTES = 384 * MIB
"""Of one that sends, receives or exchanges all to all; in a communicator that does both, beside `COLLECTIVE_BYTES`."""
DEEPEP_BYTES = 2 * GIB
"""Buffers of DeepEP in one process: what SGLang 0.5.15 sets aside for it (`server_args._handle_gpu_memory_settings`)."""
FRAGMENTATION = 0.1
"""Of the memory that comes and goes with every micro-batch: PyTorch's allocator holds blocks of 2 MiB and more, which packed rows of ever
new lengths never fill (without expandable segments it can be far more: GMLake, arXiv 2401.08156, measures up to a third)."""

# Of the Megatron trainer, from fourteen runs on H200s (docs/planner-model.md, "Measured"; tests/unit/planner/test_measured.py). Whoever
# measures more sets these three anew: workspace to what tensors lack, the other two so that no run exceeds its plan.
TRAINER_WORKSPACE_BYTES = 400 * MIB
"""Tensors that no formula has: workspaces of Transformer Engine and cuBLAS, the micro-batch. 0.3 to 0.55 GiB in all runs."""
TRAINER_HELD_BYTES = 7500 * MIB
"""Beside its tensors the process holds 4.8 to 13.3 GiB, NCCL and CUDA's context apart: `FRAGMENTATION` of what comes and goes, and this,
which followed neither the model nor its layout. Free blocks of PyTorch's allocator, and what CUDA takes for the kernels of Transformer
Engine and Triton; the two were not measured apart."""
TRAINER_LEFT_BYTES = 4464 * MIB
"""What an offloaded trainer keeps once it has trained, beside what it kept before: memory of an H200 in rollouts after the first step of a
4B model less that in the first rollout (docs/benchmarks-gpu.md, "Leaving a GPU to the engines")."""


def billions(count: float) -> str:
    """For notes: `5.43 B`."""
    return f"{count / 1e9:.2f} B"
