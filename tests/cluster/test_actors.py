"""Actors of a run on Ray.

Ranks get their replica's samples of a batch, in memory that the ranks of a node share. Engines have their GPUs among those that Ray
manages, under the machine's own numbers.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray

from fuligo.cluster.engines import RemotePart, RemoteServer
from fuligo.cluster.rank import ActorRank
from fuligo.cluster.reservation import in_physical_order, reserve, start_agent
from fuligo.config.secret import Environment
from fuligo.engines.sglang.server import ServerPorts, ServerSettings
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.trainer import RankedTrainer
from tests import train_batches
from tests.cluster.listening_rank import ListeningRank
from tests.cluster.plain_engine import PlainEngine
from tests.e2e.command import warm_start
from tests.e2e.warm_worker import serve_workers

LAYOUT = Layout(cp=2, num_ranks=4)
"""Two replicas of two ranks."""
INTERPRETER = """#!/bin/sh
echo sees $CUDA_VISIBLE_DEVICES, takes "$@"
sleep 60
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start Ray in this process, with two GPUs that have the numbers 7 and 5 on the machine, and with workers that are forked."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("CUDA_VISIBLE_DEVICES", "7,5")
        forks = warm_start().fork_server(os.environ)  # differs from its own in the numbers of the GPUs, and in what no worker here reads
        for name, value in serve_workers(forks.children, tmp_path_factory.mktemp("workers") / "socket").items():
            changed.setenv(name, value)
        changed.setenv("RAY_prestart_worker_first_driver", "0")  # as fuligo does
        size = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 100 * 2**20}
        ray.init("local", **size, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    forks.close()


@pytest.mark.parametrize(("given", "ordered"), [([5, 10, 7], ("5", "7", "10")), (["GPU-b", "GPU-a"], ("GPU-b", "GPU-a")), ([], ())])
def test_order(given: list[int | str], ordered: tuple[str, ...]) -> None:
    assert in_physical_order(given) == ordered


async def test_an_engine_counts_its_gpus_among_those_that_it_sees(cluster: None, tmp_path: Path) -> None:
    interpreter, log = tmp_path / "python", tmp_path / "engine.txt"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    async with asyncio.timeout(120):
        reservation = await reserve([2], "cuda")
        [bundle] = reservation.bundles
        agent = start_agent(reservation, bundle, "cuda", Environment())
        try:
            assert await agent.gpus.remote() == ("5", "7")
            ports, python = ServerPorts(1, 2, 3), str(interpreter)
            settings = ServerSettings("engine 0", "model", 1, 1, {}, "regular", "cuda", "127.0.0.1", ports, log, python=python)
            await agent.start.remote(settings, 0, (1,), log)
            while not (log.exists() and "takes" in log.read_text()):  # noqa: ASYNC110  # a file can only be polled
                await asyncio.sleep(0.1)
            await agent.stop.remote("engine 0")
        finally:
            ray.kill(agent)
            reservation.close()
    assert "sees 5,7, takes" in log.read_text()
    assert "--base-gpu-id 1" in log.read_text(), "the second of them has the number 7 on the machine"


async def test_a_node_starts_engines_of_any_backend(cluster: None, tmp_path: Path) -> None:
    async with asyncio.timeout(120):
        reservation = await reserve([1], "cpu")
        [bundle] = reservation.bundles
        agent = start_agent(reservation, bundle, "cpu", Environment())
        try:
            http, first = await agent.claim_ports.remote((1, 2))
            assert http not in (first, first + 1)
            settings = PlainEngine("engine 0", bundle.host, (http, first), tmp_path / "engine.txt")
            server = RemoteServer(settings, [RemotePart(agent, bundle.host, ())])
            await server.wait_ready()
            assert server.alive and await server.answers(10.0)
            await server.stop()
            assert not (server.is_lost or await settings.answers(10.0))
        finally:
            ray.kill(agent)
            reservation.close()


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
    trainer = RankedTrainer(settings, None)  # they run already
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
