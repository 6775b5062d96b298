"""Shares of samples for ranks, planned as the driver plans them, for tests that call a rank's worker."""

from typing import Any

from fuligo.trainer.ranks.worker import RankWorker
from fuligo.trainer.shares import ScoreShare, StepShare, score_shares, step_shares
from fuligo.types import TrainBatch, TrainSample

Worker = RankWorker[Any, Any, Any]
"""Rank worker of either backend."""


def to_score(worker: Worker, samples: list[TrainSample]) -> ScoreShare:
    return score_shares(samples, worker.settings, worker.balance_by)[worker.settings.replica_of(worker.world.rank)]


def to_train(worker: Worker, batch: TrainBatch) -> list[StepShare | None]:
    """Return the shares of every optimizer step; None for one that is skipped."""
    return step_shares(batch, worker.settings, worker.balance_by)[worker.settings.replica_of(worker.world.rank)]


def scored(worker: Worker, samples: list[TrainSample]) -> list[TrainSample] | None:
    """Compute the scores that are needed; return the samples on rank 0, None on other ranks."""
    if not worker.settings.scores:
        return samples
    scores = worker.score(to_score(worker, samples))
    return None if scores is None else [of_sample.filled_into(sample) for of_sample, sample in zip(scores, samples, strict=True)]
