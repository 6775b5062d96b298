"""Parameters that one rank of the trainer holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fuligo.models.architecture import Architecture, Layer, Part, Split
from fuligo.planner.plan import Stage
from fuligo.planner.stages import stage_layers
from fuligo.planner.subject import Subject
from fuligo.planner.trainer_shape import TrainerShape


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

    Frozen ones are counted too: which they are is known from the weights' names only.
    """
    train = subject.config.train
    held = _held(subject.architecture, shape, stages)
    return held + _prediction(subject, shape, stages) if train.enable_mtp_training else held


def frozen_parameters(subject: Subject, shape: TrainerShape, stages: Iterable[Stage]) -> LocalParameters:
    """Those without: layers for multi-token prediction that are loaded and not trained."""
    return LocalParameters() if subject.config.train.enable_mtp_training else _prediction(subject, shape, stages)


def prediction_layers(subject: Subject) -> tuple[Layer, ...]:
    """The layers for multi-token prediction that the trainer loads."""
    return subject.architecture.mtp_layers[: subject.config.train.mtp_num_layers or 0]


def _held(architecture: Architecture, shape: TrainerShape, stages: Iterable[Stage]) -> LocalParameters:
    held = LocalParameters()
    for stage in stages:
        for layer in stage_layers(architecture, stage):
            held += local_parameters(layer.parts, shape)
        if stage.has_embedding:
            held += local_parameters([architecture.embedding], shape)
        if stage.has_head:
            held += local_parameters([architecture.final_norm], shape)
            if architecture.head is not None:
                held += local_parameters([architecture.head], shape)
            elif not stage.has_embedding:  # a tied embedding has a copy of its own on the last stage
                held += local_parameters([architecture.embedding], shape)
    return held


def _prediction(subject: Subject, shape: TrainerShape, stages: Iterable[Stage]) -> LocalParameters:
    """Megatron computes them on the last stage, which then has the embedding as well."""
    layers = prediction_layers(subject)
    held = LocalParameters()
    for stage in stages:
        if not (stage.has_head and layers):
            continue
        for layer in layers:
            held += local_parameters(layer.parts, shape)
        if not stage.has_embedding and subject.architecture.head is not None:
            held += local_parameters([subject.architecture.embedding], shape)
    return held
