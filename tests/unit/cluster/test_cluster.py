"""Hosts of a run."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError

from fuligo.cluster.cluster import Node, open_cluster, require_hosts, silent_nodes
from fuligo.cluster.reservation import Bundle
from fuligo.config.command_line import parse
from fuligo.errors import ConfigError, TrainerError
from fuligo.trainer.ranks.supervision import RankError

BUNDLES = [Bundle(0, 1, "a", "10.0.0.1"), Bundle(1, 1, "b", "10.0.0.2")]


def test_a_trainer_starts_while_all_hosts_are_there() -> None:
    require_hosts(BUNDLES, {"b", "a", "other"})


def test_a_lost_host_ends_the_run_instead_of_a_restart() -> None:
    with pytest.raises(TrainerError, match=r"^cannot start trainer rank 1 on 10\.0\.0\.2: the host has left the Ray cluster") as found:
        require_hosts(BUNDLES, {"a"})
    assert not isinstance(found.value, RankError), "which would be restarted"


async def answer() -> tuple[str, ...]:
    return ()


async def hang() -> tuple[str, ...]:
    await asyncio.Event().wait()
    return ()


async def crash() -> tuple[str, ...]:
    raise RayActorError


class Agent:
    """Handle of an agent that answers calls in one way."""

    def __init__(self, remote: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
        self.remote = remote

    @property
    def gpus(self) -> "Agent":
        return self


async def test_a_host_that_does_not_answer_is_silent_before_ray_misses_it() -> None:
    """An agent that has crashed says nothing about its host."""
    nodes = [Node(Bundle(i, 1, name, "host"), Agent(each), ()) for i, (name, each) in enumerate([("a", answer), ("b", hang), ("c", crash)])]
    assert await silent_nodes([*nodes, *nodes], timeout_s=1.0) == {"b"}


async def test_a_run_that_needs_no_slots_is_refused_before_ray_starts(tmp_path: Path) -> None:
    config = parse(["--device", "cpu", "--debug-rollout-only", "--launcher", "ray"]).config
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"it has no trainer ranks, .* --launcher local"):
            await open_cluster(config, stack, tmp_path / "ray.txt")
    assert not ray.is_initialized()
