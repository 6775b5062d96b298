"""Ranks on Ray get their replica's samples of a batch, in memory that the ranks of a node share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray

from fuligo.cluster.rank import ActorRank
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.trainer import RankedTrainer
from tests import train_batches
from tests.cluster.listening_rank import ListeningRank

LAYOUT = Layout(cp=2, num_ranks=4)
"""Two replicas of two ranks."""


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
