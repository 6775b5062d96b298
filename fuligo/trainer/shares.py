"""What each data-parallel replica of a trainer gets of a rollout, and what it says of it.

The driver plans for all ranks, so that each is sent the samples it computes and no others: a rollout with the experts of every token is
hundreds of bytes a token, which every rank of a large run would have to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fuligo.trainer.packing import Cost, MicroBatchSchedule
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.step import StepSamples
from fuligo.types import FloatArray, RoutedExperts, TrainBatch, TrainSample

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ScoreShare:
    """A replica's part of samples that are to be scored."""

    positions: Sequence[int]
    """Of `samples` among all."""
    samples: list[TrainSample]
    schedule: MicroBatchSchedule
    """Through `samples`."""


@dataclass(slots=True, frozen=True)
class StepShare:
    """A replica's part of an optimizer step."""

    samples: StepSamples
    schedule: MicroBatchSchedule
    """Through `samples.samples`."""


@dataclass(slots=True, frozen=True)
class SampleScores:
    """What the trainer found of one sample; each only where the loss needs it."""

    old_logprobs: FloatArray | None = None
    """[R]"""
    ref_logprobs: FloatArray | None = None
    """[R]"""
    teacher_logprobs: FloatArray | None = None
    """[R]; None: the sample keeps what it has."""
    values: FloatArray | None = None
    """[R]"""
    routed_experts: RoutedExperts | None = None
    """[T - 1, M, K]; None: the sample keeps what it has."""

    def filled_into(self, sample: TrainSample) -> TrainSample:
        routed = sample.routed_experts if self.routed_experts is None else self.routed_experts
        teacher = sample.teacher_logprobs if self.teacher_logprobs is None else self.teacher_logprobs
        return replace(
            sample,
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.ref_logprobs,
            teacher_logprobs=teacher,
            values=self.values,
            routed_experts=routed,
        )


def score_shares(samples: Sequence[TrainSample], settings: TrainerSettings, balance_by: Cost | None) -> list[ScoreShare]:
    """Every replica's part. A sample is in several where a repetition keeps replicas in step.

    Args:
        balance_by: as the ranks know it.

    Raises:
        TrainerError: there are fewer samples than replicas.
    """
    own = [_own(schedule) for schedule in settings.micro_batch_schedules(_lengths(samples), settings.score_capacity, balance_by)]
    return [ScoreShare(positions, [samples[i] for i in positions], schedule) for positions, schedule in own]


def step_shares(batch: TrainBatch, settings: TrainerSettings, balance_by: Cost | None) -> list[list[StepShare]]:
    """[replicas][optimizer steps]; otherwise as `score_shares`."""
    steps: list[list[StepShare]] = []
    for step in range(len(batch.steps)):
        samples = StepSamples.of(batch, step, settings.loss)
        own = [_own(schedule) for schedule in settings.micro_batch_schedules(_lengths(samples.samples), settings.capacity, balance_by)]
        steps.append([StepShare(samples.some(positions), schedule) for positions, schedule in own])
    return [list(of_replica) for of_replica in zip(*steps, strict=True)]


def in_order(of_ranks: Iterable[Mapping[int, T]]) -> list[T]:
    """What ranks found of their samples, by position, as one list of all."""
    found = {i: value for of_rank in of_ranks for i, value in of_rank.items()}
    return [found[i] for i in range(len(found))]


def _lengths(samples: Sequence[TrainSample]) -> list[int]:
    return [len(sample.tokens) for sample in samples]


def _own(schedule: MicroBatchSchedule) -> tuple[list[int], MicroBatchSchedule]:
    """The positions of the samples that go through, and the schedule as positions among these."""
    positions = sorted({i for plan in schedule.plans for i in plan.samples})
    place = {position: number for number, position in enumerate(positions)}
    plans = [replace(plan, samples=tuple(place[i] for i in plan.samples)) for plan in schedule.plans]
    return positions, replace(schedule, plans=plans)
