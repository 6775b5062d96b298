"""Engines and router that die or stop are restarted; requests still succeed, weights are current, and nothing is left at the end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fuligo.engines.client import EngineClient
from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet
from fuligo.errors import EngineError
from tests.e2e.processes import alive, descendants
from tests.sglang.conftest import SEEN_S, fleet_settings
from tests.sglang.engines import SPAWNING

PROMPT = list(range(20, 60))
LONG = SamplingParams(max_new_tokens=300, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest_asyncio.fixture
async def fleet(nothing_shared_stays: None, checkpoint: Path, claims: PortClaims, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.launch(fleet_settings(checkpoint, claims, tmp_path))
    yield fleet
    await fleet.stop()


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["killed", "stopped"])
async def test_engine_and_router_come_back(fleet: Fleet, number: signal.Signals) -> None:
    renewed: list[str] = []
    may_serve = asyncio.Event()

    async def renew(client: EngineClient) -> bool:
        await may_serve.wait()
        await fleet.group.admit([client])
        renewed.append(client.url)
        return True

    fleet.sync_restarted = renew
    watch = asyncio.create_task(fleet.watch())
    await asyncio.sleep(SEEN_S)

    # An engine dies during sampling, or stops with its connections open; its requests finish on the other engine.
    requests = [asyncio.create_task(fleet.group.generate(PROMPT, LONG, rid=f"{n}", timeout_s=120)) for n in range(16)]
    await asyncio.sleep(0.5)
    victim = fleet.servers[0]
    below = list(descendants(victim.pid))
    for pid in below if number == signal.SIGSTOP else below[:1]:
        os.kill(pid, number)
    generations = await asyncio.gather(*requests)
    assert [len(generation.output_ids) for generation in generations] == [LONG.max_new_tokens] * 16
    while victim.url in fleet.group.urls:  # a stopped engine is found by its health check alone
        assert not watch.done()
        await asyncio.sleep(0.1)
    assert fleet.group.urls == (fleet.servers[1].url,)
    assert {generation.engine for generation in generations} <= {0, 1}, (
        "the answering engine is known, although the router does not report it"
    )

    # It is restarted, and serves once it has the weights.
    may_serve.set()
    while not renewed:
        assert not watch.done()
        await asyncio.sleep(0.1)
    assert renewed == [victim.url]
    assert set(fleet.group.urls) == {server.url for server in fleet.servers}
    assert {worker.url for worker in await fleet.router.workers()} == set(fleet.group.urls)
    assert len((await fleet.group.clients[-1].generate(PROMPT, SHORT, rid="again")).output_ids) == 4

    # The router dies with its guard; requests wait for its successor, which knows the engines.
    dead_router = descendants(fleet.router.pid)
    os.kill(fleet.router.pid, signal.SIGKILL)
    generations = await asyncio.gather(*(fleet.group.generate(PROMPT, SHORT, rid=f"after-{n}", timeout_s=120) for n in range(4)))
    assert all(len(generation.output_ids) == 4 for generation in generations)
    while await known_workers(fleet) != set(fleet.group.urls):
        assert not watch.done()
        await asyncio.sleep(0.1)
    assert dead_router and not alive(dead_router)

    watch.cancel()
    pids = [pid for process in (fleet.router, *fleet.servers) for pid in (process.pid, *descendants(process.pid))]
    await fleet.stop()
    assert not [pid for pid in pids if exists(pid)]


async def known_workers(fleet: Fleet) -> set[str]:
    """Return the engines that the router knows; none while it is down: the one that dies may still have answered the requests."""
    try:
        return {worker.url for worker in await fleet.router.workers()}
    except EngineError:
        return set()


@pytest.mark.slow
async def test_an_engine_whose_guard_is_killed_restarts_when_its_processes_are_gone(
    checkpoint: Path, claims: PortClaims, tmp_path: Path
) -> None:
    """tests/unit/engines/test_server_process.py tests the same with a server that leaves more behind."""
    fleet = await Fleet.launch(fleet_settings(checkpoint, claims, tmp_path, num_engines=1, environment=SPAWNING))
    try:
        victim = fleet.servers[0]
        below = descendants(victim.pid)
        watch = asyncio.create_task(fleet.watch())
        os.kill(victim.pid, signal.SIGKILL)
        while fleet.servers[0] is victim:
            assert not watch.done()
            await asyncio.sleep(0.01)
        assert len(below) > 1 and not alive(below)
        await fleet.servers[0].wait_ready()
        watch.cancel()
    finally:
        await fleet.stop()


async def test_an_engine_that_cannot_start_says_why(
    nothing_shared_stays: None, checkpoint: Path, claims: PortClaims, tmp_path: Path
) -> None:
    settings = fleet_settings(tmp_path / "no-model-here", claims, tmp_path, num_engines=1)
    with pytest.raises(EngineError, match=r"(?s)engine 0 ended with exit code \d+; its log \(.*engine-0.txt\) ends:.*no-model-here"):
        await Fleet.launch(settings)
