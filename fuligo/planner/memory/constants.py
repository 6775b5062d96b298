"""Measured memory constants, each with its source."""

from fuligo.planner.gpus import GIB, MIB

CUDA_CONTEXT_BYTES = 700 * MIB
"""One training process: CUDA's context (617 MiB), cuBLAS's workspace (64 MiB) and loaded kernels (16 MiB), measured with PyTorch
2.11 and CUDA 13.0 on an H200."""
COLLECTIVE_BYTES = 484 * MIB
"""One NCCL communicator that reduces or gathers; measured on two H200s linked by NVLink, multicast off."""
POINT_TO_POINT_BYTES = 384 * MIB
"""One NCCL communicator that sends, receives or exchanges all to all; added to `COLLECTIVE_BYTES` if it does both."""
DEEPEP_BYTES = 2 * GIB
"""Buffers of DeepEP in one process, as reserved by SGLang 0.5.15 (`server_args._handle_gpu_memory_settings`)."""
FRAGMENTATION = 0.1
"""Share of the memory allocated per micro-batch: PyTorch's allocator holds blocks of 2 MiB and more, which packed rows of varying lengths
do not fill (without expandable segments it can be far more: GMLake, arXiv 2401.08156, measures up to a third)."""

# Megatron trainer, from fourteen runs on H200s (docs/planner-model.md, "Measured"; tests/unit/planner/test_measured.py). To refit with more
# runs, set workspace to the tensors that are unaccounted for, and the other two so that no run exceeds its plan.
TRAINER_WORKSPACE_BYTES = 400 * MIB
"""Tensors that no formula covers: workspaces of Transformer Engine and cuBLAS, the micro-batch. 0.3 to 0.55 GiB in all runs."""
TRAINER_HELD_BYTES = 7500 * MIB
"""Constant part of the 4.8 to 13.3 GiB that the process holds in addition to its tensors, NCCL and CUDA's context; the rest is
`FRAGMENTATION`. It depends on neither model nor layout: free blocks of PyTorch's allocator, and CUDA memory for the kernels of Transformer
Engine and Triton (not measured separately)."""
TRAINER_LEFT_BYTES = 4464 * MIB
"""Additional memory of an offloaded trainer after its first training step: memory of an H200 in rollouts after the first step of a
4B model less that in the first rollout (docs/benchmarks-gpu.md, "Leaving a GPU to the engines")."""


def billions(count: float) -> str:
    """Format a count for notes, such as `5.43 B`."""
    return f"{count / 1e9:.2f} B"
