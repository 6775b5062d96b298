"""Shares of a rollout that the driver sends to each data-parallel replica, and the scores that a replica returns.

The driver plans the micro-batches of all replicas and sends each replica only the samples it computes. A rollout that records the
experts of every token takes hundreds of bytes per token, too much for every rank of a large run to hold in full.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

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
    """Trainer's scores of one sample. A score that the loss does not need is None; the sample then keeps its current value."""

    old_logprobs: FloatArray | None = None
    """[R] policy's log-probabilities before the rollout's first optimizer step."""
    ref_logprobs: FloatArray | None = None
    """[R] reference model's log-probabilities."""
    teacher_logprobs: FloatArray | None = None
    """[R] teacher's log-probabilities."""
    values: FloatArray | None = None
    """[R] predictions of the value model."""
    routed_experts: RoutedExperts | None = None
    """[T - 1, M, K] experts that the policy's routers chose (see `RoutedExperts`)."""

    def filled_into(self, sample: TrainSample) -> TrainSample:
        """Return a copy of the sample with these scores."""
        return replace(sample, **{each.name: score for each in fields(self) if (score := getattr(self, each.name)) is not None})


def score_shares(samples: Sequence[TrainSample], settings: TrainerSettings, balance_by: Cost | None) -> list[ScoreShare]:
    """Return one share for each data-parallel replica. A sample that is repeated to keep the replicas in step is in several shares.

    Raises TrainerError if `samples` is empty.
    """
    own = [_localize(schedule) for schedule in settings.micro_batch_schedules(samples, settings.score_capacity, balance_by)]
    return [ScoreShare(positions, [samples[i] for i in positions], schedule) for positions, schedule in own]


def step_shares(batch: TrainBatch, settings: TrainerSettings, balance_by: Cost | None) -> list[list[StepShare | None]]:
    """Return [replicas][optimizer steps] shares of the batch. They do not contain skipped samples; the share of a skipped step is None."""
    steps: list[Sequence[StepShare | None]] = []
    for step, positions in enumerate(trained_positions(batch, skips_zero_advantages=settings.skips_zero_advantages)):
        if not positions:
            steps.append([None] * settings.num_replicas)
            continue
        samples = StepSamples.of(batch, step, settings.loss, positions)
        own = [_localize(schedule) for schedule in settings.micro_batch_schedules(samples.samples, settings.capacity, balance_by)]
        steps.append([StepShare(samples.select(positions), schedule) for positions, schedule in own])
    return [[of_step[replica] for of_step in steps] for replica in range(settings.num_replicas)]


def trained_positions(batch: TrainBatch, *, skips_zero_advantages: bool) -> list[list[int]]:
    """Return the positions of the samples that each optimizer step trains; an empty list if the step is skipped."""
    if not skips_zero_advantages:
        return batch.steps
    has_advantage = [np.any(sample.advantages[sample.loss_mask != 0]) for sample in batch.samples]
    return [[position for position in step if has_advantage[position]] for step in batch.steps]


def skip_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return `train/num_skipped_steps` and `train/skipped_share` (of samples) if samples whose advantages are all 0 are skipped."""
    trained = trained_positions(batch, skips_zero_advantages=True)
    return {
        "train/num_skipped_steps": sum(not positions for positions in trained),
        "train/skipped_share": 1 - sum(map(len, trained)) / len(batch.samples),
    }


def join_by_position(of_ranks: Iterable[Mapping[int, T]]) -> list[T]:
    """Merge the ranks' values, each keyed by position, into one list in the order of positions."""
    found = {i: value for of_rank in of_ranks for i, value in of_rank.items()}
    return [found[i] for i in range(len(found))]


def _localize(schedule: MicroBatchSchedule) -> tuple[list[int], MicroBatchSchedule]:
    """Return the positions of the schedule's samples, and the schedule with indices into these positions instead."""
    positions = sorted({i for plan in schedule.plans for i in plan.samples})
    place = {position: number for number, position in enumerate(positions)}
    plans = [replace(plan, samples=tuple(place[i] for i in plan.samples)) for plan in schedule.plans]
    return positions, replace(schedule, plans=plans)
