"""Parameters that one rank of the trainer holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fuligo.layout.trainer_shape import TrainerShape
from fuligo.models.architecture import Architecture, Layer, Part, PartKind, Split
from fuligo.planner.plan import Stage
from fuligo.planner.stages import stage_layers
from fuligo.planner.subject import Subject


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """Parameters of one rank: experts apart, because other ranks share their optimizer state."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def __add__(self, other: LocalParameters) -> LocalParameters:
        return LocalParameters(self.dense + other.dense, self.experts + other.experts)


def local_parameters(parts: Iterable[Part], shape: TrainerShape) -> LocalParameters:
    """What a rank holds of `parts`."""
    dense = experts = 0
    for part in parts:
        if part.split is Split.EXPERT:
            experts += part.num_parameters // (shape.ep * shape.etp)
        else:
            dense += part.num_parameters // (shape.tp if part.split is Split.TENSOR else 1)
    return LocalParameters(dense, experts)


def trained_parameters(subject: Subject, shape: TrainerShape, stages: Iterable[Stage]) -> LocalParameters:
    """Parameters of a rank of `stages` (one pipeline rank's) that have gradients.

    What the lists of trained parameters freeze is counted too: which it is is known from the weights' names only.
    """
    stages = tuple(stages)
    held = _outer(subject.architecture, shape, stages) + _in_layers(subject.architecture, shape, stages, are_indexers=False)
    return held + _prediction(subject, shape, stages, are_indexers=False) if subject.config.train.enable_mtp_training else held


def frozen_parameters(subject: Subject, shape: TrainerShape, stages: Iterable[Stage]) -> LocalParameters:
    """Those without: the indexers of sparse attention, and layers for multi-token prediction that are loaded and not trained."""
    stages = tuple(stages)
    frozen = _in_layers(subject.architecture, shape, stages, are_indexers=True) + _prediction(subject, shape, stages, are_indexers=True)
    return frozen if subject.config.train.enable_mtp_training else frozen + _prediction(subject, shape, stages, are_indexers=False)


def prediction_layers(subject: Subject) -> tuple[Layer, ...]:
    """The layers for multi-token prediction that the trainer loads."""
    return subject.architecture.mtp_layers[: subject.config.train.mtp_num_layers or 0]


def _in_layers(architecture: Architecture, shape: TrainerShape, stages: Iterable[Stage], *, are_indexers: bool) -> LocalParameters:
    """Of the layers, their indexers or all else."""
    layers = [layer for stage in stages for layer in stage_layers(architecture, stage)]
    return local_parameters(_parts(layers, are_indexers=are_indexers), shape)


def _parts(layers: Iterable[Layer], *, are_indexers: bool) -> list[Part]:
    return [part for layer in layers for part in layer.parts if (part.kind is PartKind.INDEXER) == are_indexers]


def _outer(architecture: Architecture, shape: TrainerShape, stages: Iterable[Stage]) -> LocalParameters:
    """Outside of the layers."""
    held = LocalParameters()
    for stage in stages:
        if stage.has_embedding:
            held += local_parameters([architecture.embedding], shape)
        if stage.has_head:
            held += local_parameters([architecture.final_norm], shape)
            if architecture.head is not None:
                held += local_parameters([architecture.head], shape)
            elif not stage.has_embedding:  # a tied embedding has a copy of its own on the last stage
                held += local_parameters([architecture.embedding], shape)
    return held


def _prediction(subject: Subject, shape: TrainerShape, stages: Iterable[Stage], *, are_indexers: bool) -> LocalParameters:
    """The indexers of prediction layers, or all else. Megatron computes them on the last stage, which then has the embedding as well."""
    layers = prediction_layers(subject)
    held = LocalParameters()
    for stage in stages:
        if not (stage.has_head and layers):
            continue
        held += local_parameters(_parts(layers, are_indexers=are_indexers), shape)
        if not are_indexers and not stage.has_embedding and subject.architecture.head is not None:
            held += local_parameters([subject.architecture.embedding], shape)
    return held
