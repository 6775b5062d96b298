"""Ranks on Ray get their replica's samples of a batch, in memory that the ranks of a node share."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

import ray

from fuligo.cluster.rank import ActorRank
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.commands import Answer, Command
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.trainer import RankedTrainer
from fuligo.trainer.shares import SampleScores
from fuligo.types import StepResult, TrainSample
from tests import train_batches

LAYOUT = Layout(cp=2, num_ranks=4)
"""Two replicas of two ranks."""


class ListeningRank:
    """Rank that records what it was sent."""

    def __init__(self) -> None:
        self._positions: list[list[int]] = []

    async def run(self, command: Command[Any]) -> Answer[Any]:
        (sent,) = command.arguments
        if command.name == "score":
            self._positions.append(list(sent.positions))
            return Answer([SampleScores(old_logprobs=np.zeros(1, np.float32))] * 16)
        assert command.name == "train"
        self._positions += [list(step.samples.positions) for step in sent]
        samples = [sample for step in sent for sample in step.samples.samples]
        assert not any(array.flags.owndata or array.flags.writeable for array in _arrays(samples)), "each is in the object store"
        return Answer(StepResult(metrics={}, scores={}, num_tokens=0))

    async def positions(self) -> list[list[int]]:
        """Return the positions of its samples for every call and step."""
        return self._positions


def _arrays(samples: list[TrainSample]) -> Iterator[np.ndarray]:
    values = (getattr(sample, field.name) for sample in samples for field in fields(sample))
    return (value for value in values if isinstance(value, np.ndarray))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


async def test_a_rank_gets_its_replicas_samples_and_reads_them_in_the_object_store(cluster: None, tmp_path: Path) -> None:
    settings = MegatronTrainerSettings(
        hf_checkpoint=tmp_path,
        initial_weights=tmp_path,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
        needs_old_logprobs=True,
        capacity=Capacity(max_tokens=100),
        layout=LAYOUT,
        num_ranks=LAYOUT.num_ranks,
    )
    actors = [ray.remote(ListeningRank).options(num_cpus=0).remote() for _ in range(settings.num_ranks)]
    trainer = RankedTrainer(settings, None)  # pyright: ignore[reportArgumentType]  # they run already
    trainer.ranks = [ActorRank(rank, "here", actor, tmp_path / "log.txt") for rank, actor in enumerate(actors)]
    samples = train_batches.samples([(4, 30)] * 16)
    scored = await trainer.score(samples)
    assert all(after.old_logprobs is not None and after.tokens is before.tokens for after, before in zip(scored, samples, strict=True))
    await trainer.train(train_batches.batch(scored, num_steps=2))
    first, same, second, other = [await actor.positions.remote() for actor in actors]
    assert first == same and second == other
    everything = [list(range(16)), list(range(8)), list(range(8, 16))]
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == everything
    assert all(len(a) == len(b) for a, b in zip(first, second))
