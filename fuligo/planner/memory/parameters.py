"""Parameters of one trainer rank, and measured constants of memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from fuligo.layout.adapter import AdapterShape
from fuligo.layout.megatron import Layout
from fuligo.models.architecture import Architecture, Layer, Part, PartKind, Split
from fuligo.planner.gpus import GIB, MIB
from fuligo.planner.layout import stage_layers
from fuligo.planner.plan import Stage
from fuligo.planner.subject import Subject


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """Number of parameters on one rank. Experts are counted separately: their optimizer state is sharded over another group of ranks."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def __add__(self, other: Self) -> Self:
        return replace(self, dense=self.dense + other.dense, experts=self.experts + other.experts)


def local_parameters(parts: Iterable[Part], shape: Layout) -> LocalParameters:
    dense = experts = 0
    for part in parts:
        if part.split is Split.EXPERT:
            experts += part.num_parameters // (shape.ep * shape.etp)
        else:
            dense += part.num_parameters // (shape.tp if part.split is Split.TENSOR else 1)
    return LocalParameters(dense, experts)


def trained_parameters(subject: Subject, shape: Layout, stages: Iterable[Stage]) -> LocalParameters:
    """Return the parameters with gradients on a rank that holds `stages` (those of one pipeline rank).

    Parameters that --freeze-params-name-list or --only-train-params-name-list freezes count too: the plan does not know parameter names.
    """
    stages = tuple(stages)
    if subject.adapter is not None:
        return adapter_parameters(subject.adapter, shape, stages)
    held = _model_parameters(subject, shape, stages)
    return held + _mtp(subject, shape, stages, are_indexers=False) if subject.config.train.enable_mtp_training else held


def adapter_parameters(adapter: AdapterShape, shape: Layout, stages: Iterable[Stage]) -> LocalParameters:
    """Return the parameters of an adapter on a rank with `stages`."""
    layers = [layer for stage in stages for layer in stage_layers(adapter.architecture, stage)]
    return LocalParameters(
        dense=sum(adapter.dense_parameters(layer, shape.tp) for layer in layers),
        experts=sum(adapter.experts_parameters(layer, shape.ep, shape.etp) for layer in layers),
    )


def frozen_parameters(subject: Subject, shape: Layout, stages: Iterable[Stage]) -> LocalParameters:
    """Return the parameters without gradients.

    They are the indexers of sparse attention, MTP layers that are loaded but not trained, and with an adapter all base weights.
    """
    stages = tuple(stages)
    below = LocalParameters() if subject.adapter is None else _model_parameters(subject, shape, stages)
    frozen = below + _in_layers(subject.architecture, shape, stages, are_indexers=True) + _mtp(subject, shape, stages, are_indexers=True)
    return frozen if subject.config.train.enable_mtp_training else frozen + _mtp(subject, shape, stages, are_indexers=False)


def _model_parameters(subject: Subject, shape: Layout, stages: tuple[Stage, ...]) -> LocalParameters:
    """Return the parameters of a rank without indexers and MTP layers."""
    architecture = subject.architecture
    outer: list[Part] = []
    for stage in stages:
        outer += [architecture.embedding] if stage.has_embedding else []
        if stage.has_head:
            outer.append(architecture.final_norm)
            if architecture.head is not None:
                outer.append(architecture.head)
            elif not stage.has_embedding:  # a tied embedding has its own copy on the last stage
                outer.append(architecture.embedding)
    return local_parameters(outer, shape) + _in_layers(architecture, shape, stages, are_indexers=False)


def _in_layers(architecture: Architecture, shape: Layout, stages: Iterable[Stage], *, are_indexers: bool) -> LocalParameters:
    """Return the parameters of the layers: those of indexers, or all others."""
    layers = [layer for stage in stages for layer in stage_layers(architecture, stage)]
    return local_parameters(_parts(layers, are_indexers=are_indexers), shape)


def _parts(layers: Iterable[Layer], *, are_indexers: bool) -> list[Part]:
    return [part for layer in layers for part in layer.parts if (part.kind is PartKind.INDEXER) == are_indexers]


def _mtp(subject: Subject, shape: Layout, stages: Iterable[Stage], *, are_indexers: bool) -> LocalParameters:
    """Return the parameters of MTP layers: those of indexers, or all others. Megatron puts them and an embedding on the last stage."""
    layers = subject.loaded_mtp_layers
    held = LocalParameters()
    for stage in stages:
        if not (stage.has_head and layers):
            continue
        held += local_parameters(_parts(layers, are_indexers=are_indexers), shape)
        if not are_indexers and not stage.has_embedding and subject.architecture.head is not None:
            held += local_parameters([subject.architecture.embedding], shape)
    return held


CUDA_CONTEXT_BYTES = 700 * MIB
"""Bytes of one training process without its tensors: CUDA's context (617 MiB), cuBLAS's workspace (64 MiB) and loaded kernels (16 MiB),
measured with PyTorch 2.11 and CUDA 13.0 on an H200."""
COLLECTIVE_BYTES = 484 * MIB
"""Bytes of one NCCL communicator that reduces or gathers; measured on two H200s linked by NVLink, multicast off."""
POINT_TO_POINT_BYTES = 384 * MIB
"""Bytes of one NCCL communicator that sends, receives or exchanges all to all; added to `COLLECTIVE_BYTES` if it does both."""
DEEPEP_BYTES = 2 * GIB
"""Buffers of DeepEP in one process, as reserved by SGLang 0.5.15 (`server_args._handle_gpu_memory_settings`)."""
FRAGMENTATION = 0.1
"""Memory lost to fragmentation, relative to that allocated per micro-batch: PyTorch's allocator holds blocks of at least 2 MiB that packed
rows of varying lengths do not fill (without expandable segments it can be far more: GMLake, arXiv 2401.08156, measures up to a third)."""
SPLIT_FRAGMENTATION = 0.12
"""Memory lost to fragmentation with an optimizer on GPU and CPU, relative to its state on the GPU: fitted to one run of Qwen3-30B-A3B on
four H200s, with 15% of the state on the GPUs (docs/planner-model.md, "Measured")."""

# Megatron trainer, from seventeen runs on H200s (docs/planner-model.md, "Measured"; tests/unit/planner/test_measured.py). To refit with
# more runs, set TRAINER_WORKSPACE_BYTES to the tensors that are unaccounted for, then TRAINER_HELD_BYTES and FRAGMENTATION so that no run
# exceeds its plan by more than 1%.
TRAINER_WORKSPACE_BYTES = 400 * MIB
"""Tensors that no formula covers: workspaces of Transformer Engine and cuBLAS, the micro-batch. Measured tensors exceed the formulas by
0.4 to 0.6 GiB in most runs (-0.2 to 0.9 GiB in all)."""
TRAINER_HELD_BYTES = 7500 * MIB
"""Constant part of the memory that the process holds in addition to its tensors (4.8 to 13.4 GiB in all), after NCCL, CUDA's context and
`FRAGMENTATION`. It depends on neither model nor layout: free blocks of PyTorch's allocator, and CUDA memory for the kernels of Transformer
Engine and Triton (not measured separately)."""
TRAINER_LEFT_BYTES = 4464 * MIB
"""Additional memory of an offloaded trainer after its first step, measured on an H200 with a 4B model: memory in use in later rollouts less
that in the first rollout (docs/benchmarks-gpu.md, "Leaving a GPU to the engines")."""


def billions(count: float) -> str:
    """Format a count for notes, such as `5.43 B`."""
    return f"{count / 1e9:.2f} B"
