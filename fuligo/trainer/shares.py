"""Shares of a rollout that each data-parallel replica of a trainer receives, and the scores that it returns.

The driver plans for all ranks, so that each receives only the samples it computes: a rollout with the experts of every token is
hundreds of bytes a token, which every rank of a large run would have to hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from fuligo.trainer.packing import Cost, MicroBatchSchedule
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.step import StepSamples
from fuligo.types import FloatArray, RoutedExperts, TrainBatch, TrainSample

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ScoreShare:
    """One replica's share of samples to score."""

    positions: Sequence[int]
    """Positions of `samples` in the whole list."""
    samples: list[TrainSample]
    schedule: MicroBatchSchedule
    """Micro-batches of `samples`."""


@dataclass(slots=True, frozen=True)
class StepShare:
    """One replica's share of an optimizer step."""

    samples: StepSamples
    schedule: MicroBatchSchedule
    """Micro-batches of `samples.samples`."""


@dataclass(slots=True, frozen=True)
class SampleScores:
    """The trainer's scores of one sample, each only where the loss needs it; where it is None, the sample keeps what it has."""

    old_logprobs: FloatArray | None = None
    """[R]"""
    ref_logprobs: FloatArray | None = None
    """[R]"""
    teacher_logprobs: FloatArray | None = None
    """[R]"""
    values: FloatArray | None = None
    """[R]"""
    routed_experts: RoutedExperts | None = None
    """[T - 1, M, K]"""

    def filled_into(self, sample: TrainSample) -> TrainSample:
        return replace(sample, **{each.name: score for each in fields(self) if (score := getattr(self, each.name)) is not None})


def score_shares(samples: Sequence[TrainSample], settings: TrainerSettings, balance_by: Cost | None) -> list[ScoreShare]:
    """Return every replica's share. A sample is in several shares where a repetition keeps replicas in step.

    Raises:
        TrainerError: there is no sample.
    """
    own = [_localize(schedule) for schedule in settings.micro_batch_schedules(_lengths(samples), settings.score_capacity, balance_by)]
    return [ScoreShare(positions, [samples[i] for i in positions], schedule) for positions, schedule in own]


def step_shares(batch: TrainBatch, settings: TrainerSettings, balance_by: Cost | None) -> list[list[StepShare]]:
    """Return [replicas][optimizer steps] shares; otherwise as `score_shares`."""
    steps: list[list[StepShare]] = []
    for step in range(len(batch.steps)):
        samples = StepSamples.of(batch, step, settings.loss)
        own = [_localize(schedule) for schedule in settings.micro_batch_schedules(_lengths(samples.samples), settings.capacity, balance_by)]
        steps.append([StepShare(samples.select(positions), schedule) for positions, schedule in own])
    return [list(of_replica) for of_replica in zip(*steps, strict=True)]


def join_by_position(of_ranks: Iterable[Mapping[int, T]]) -> list[T]:
    """Join values by position from several ranks into one list of all."""
    found = {i: value for of_rank in of_ranks for i, value in of_rank.items()}
    return [found[i] for i in range(len(found))]


def _lengths(samples: Sequence[TrainSample]) -> list[int]:
    return [len(sample.tokens) for sample in samples]


def _localize(schedule: MicroBatchSchedule) -> tuple[list[int], MicroBatchSchedule]:
    """Return the positions of the samples in the schedule, and the schedule with positions among these samples."""
    positions = sorted({i for plan in schedule.plans for i in plan.samples})
    place = {position: number for number, position in enumerate(positions)}
    plans = [replace(plan, samples=tuple(place[i] for i in plan.samples)) for plan in schedule.plans]
    return positions, replace(schedule, plans=plans)
