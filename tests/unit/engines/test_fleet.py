"""Supervision of engines that are lost for good. (Restarts of real engines: tests/sglang/test_fleet.py.)"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from fuligo.engines.backend import Server
from fuligo.engines.client import EngineClient
from fuligo.engines.sglang import fleet as fleet_module
from fuligo.engines.sglang.fleet import Fleet, FleetSettings, Start
from fuligo.engines.sglang.router import RouterSettings
from fuligo.engines.sglang.server import ServerPorts, ServerSettings
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import NO_KEYS


class ScriptedServer:
    """Scripted server. Implements `Server`."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.url = settings.url
        self.alive = True
        self.is_lost = False
        self.crashing = False
        """Answers nobody any more, and ends soon."""

    def lose_machine(self) -> None:
        self.alive, self.is_lost = False, True

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineError(f"{self.settings.name} is gone")

    async def wait_ready(self) -> None:
        self.check_alive()

    async def answers(self, timeout_s: float) -> bool:
        if self.crashing:
            asyncio.get_running_loop().call_later(0.05, setattr, self, "alive", False)
        return self.alive and not self.crashing

    async def stop(self) -> None:
        self.alive = False


class ScriptedRouter:
    """Router that records the engines it sends requests to."""

    def __init__(self) -> None:
        self.alive = True
        self.url = "http://127.0.0.1:1"
        self.keys = NO_KEYS
        self.engines: list[str] = []
        self.refuses: set[str] = set()
        """Engines that it does not find healthy, once."""

    async def add(self, url: str, key: str, **_: object) -> None:
        self.check_alive()
        if url in self.refuses:
            self.refuses.remove(url)
            raise EngineError(f"engine {url} was not added by the router")
        self.engines.append(url)

    async def remove(self, url: str) -> None:
        self.check_alive()
        self.engines = [known for known in self.engines if known != url]

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineError("router: connection refused")

    async def stop(self) -> None:
        self.alive = False


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedRouter]:
    """Return the servers that were started, in order."""
    started: list[ScriptedRouter] = []

    async def launch(settings: RouterSettings) -> ScriptedRouter:
        started.append(ScriptedRouter())
        return started[-1]

    monkeypatch.setattr(fleet_module, "launch_router", launch)
    monkeypatch.setattr(fleet_module, "WATCH_S", 0.01)
    monkeypatch.setattr(fleet_module, "ENDING_POLL_S", 0.01)
    return started


async def fleet_of(
    servers: Sequence[str], log: Path, *, restart: bool = True, health_interval_s: float = 1.0, start: Start = ScriptedServer
) -> Fleet:
    """Start a fleet of scripted servers.

    Args:
        servers: types of the servers
    """
    settings = FleetSettings(
        servers=tuple(
            ServerSettings(f"engine {number}", "model", 1, 1, {}, kind, "cpu", f"10.0.0.{number}", ServerPorts(1, 2, 3), log, number)
            for number, kind in enumerate(servers)
        ),
        router=RouterSettings(log, "127.0.0.1", 1, 2),
        restart=restart,
        health_interval_s=health_interval_s,
        health_timeout_s=1.0,
        request_retries=0,
        request_timeout_s=1.0,
    )
    return await Fleet.launch(settings, start)


async def test_an_engine_that_does_not_start_leaves_no_router_behind(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    class Broken(ScriptedServer):
        async def wait_ready(self) -> None:
            raise EngineError("engine 0 ended while starting")

    with pytest.raises(EngineError, match="ended while starting"):
        await fleet_of(["regular"], tmp_path / "log", start=Broken)
    assert [router.alive for router in routers] == [False]


async def test_the_other_engines_continue_without_one_whose_machine_is_lost(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    """Requests are retried through a new router, because the engine that the old one waits for will not come back."""
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log")
    other, lost = fleet.servers
    watch = asyncio.create_task(fleet.watch())
    lost.lose_machine()
    async with asyncio.timeout(120):
        while len(routers) < 2 or not routers[1].engines:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
    assert not routers[0].alive
    assert routers[1].engines == [other.url]
    assert (fleet.servers, fleet.group.urls) == ([other], (other.url,))
    assert not watch.done()
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


@pytest.mark.parametrize("servers", [["regular"], ["prefill", "decode"]])
async def test_without_another_of_its_kind_the_run_ends(servers: list[str], routers: list[ScriptedRouter], tmp_path: Path) -> None:
    fleet = await fleet_of(servers, tmp_path / "log")
    fleet.servers[0].lose_machine()
    with pytest.raises(EngineError, match=r"engine 0 was lost with its machine 10\.0\.0\.0, and no other engine is left"):
        async with asyncio.timeout(120):
            await fleet.watch()


def crash(server: Server[ServerSettings]) -> None:
    assert isinstance(server, ScriptedServer)
    server.crashing = True


async def test_an_engine_that_is_about_to_end_is_waited_for(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    """The error that ends a run names the engine, not the request that it left unanswered."""
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log", restart=False)
    await fleet.check_alive()
    crash(fleet.servers[1])
    with pytest.raises(EngineError, match="engine 1 is gone"):
        await fleet.check_alive()


async def test_the_watch_waits_for_an_engine_that_is_about_to_end(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log", restart=False)
    crash(fleet.servers[1])
    with pytest.raises(EngineError, match="engine 1 is gone"):
        async with asyncio.timeout(120):
            await fleet.watch()


async def test_an_engine_that_neither_answers_nor_ends_is_named(
    routers: list[ScriptedRouter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "ENDING_S", 0.05)
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log", restart=False)
    monkeypatch.setattr(fleet.servers[0], "answers", AsyncMock(return_value=False))
    with pytest.raises(EngineError, match=r"engine 0 .* does not answer; its log is"):
        await fleet.check_alive()


async def test_an_engine_that_was_too_late_once_is_lost(
    routers: list[ScriptedRouter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may answer again, but it is unknown which calls it carried out."""
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log")
    late, other = fleet.group.clients
    for client in (late, other):
        monkeypatch.setattr(client, "scheduler_answers", AsyncMock(return_value=True))
    late.is_overdue = True
    assert [await fleet.is_lost(late), await fleet.is_lost(other)] == [True, False]
    assert fleet.group.clients == [other]
    await fleet.stop()


async def test_a_restart_that_is_quicker_than_a_health_check_is_no_loss(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    """The missing answer belongs to the process before the restart."""
    fleet = await fleet_of(["regular"], tmp_path / "log", health_interval_s=0.05)
    fleet.sync_restarted = fleet.serve_as_loaded
    [before], [client] = fleet.servers, fleet.group.clients
    asked, told = asyncio.Event(), asyncio.Event()

    async def hangs(timeout_s: float) -> bool:
        asked.set()
        await told.wait()
        return False

    before.answers = hangs
    watch = asyncio.create_task(fleet.watch())
    async with asyncio.timeout(120):
        await asked.wait()
        client.is_overdue = True
        assert await fleet.is_lost(client), "a call noticed it first"
        while not fleet.group.clients:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
        [after] = fleet.servers
        asked_again = asyncio.Event()
        answers = after.answers

        async def notes(timeout_s: float) -> bool:
            asked_again.set()
            return await answers(timeout_s)

        after.answers = notes
        told.set()
        await asked_again.wait()
    assert fleet.servers == [after]
    assert [client.start for client in fleet.group.clients] == [1]
    watch.cancel()
    await fleet.stop()


async def test_a_restarted_engine_does_not_wait_for_its_turn(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    """The engine has had it, and the file may be gone by then: some machines empty their temporary directory."""
    fleet = await fleet_of(["regular"], tmp_path / "log")
    fleet.sync_restarted = fleet.serve_as_loaded
    [server] = fleet.servers
    assert isinstance(server, ScriptedServer)
    server.settings = replace(server.settings, turn=tmp_path / "turn")
    fleet.group.clients[0].is_overdue = True
    assert await fleet.is_lost(fleet.group.clients[0])
    await served_by(routers[0], fleet)
    assert fleet.servers[0].settings.turn is None
    await fleet.stop()


async def test_engines_that_hang_are_found_in_the_time_of_one(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    """A lost machine may take many engines with it, and each of them is waited for."""
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log")
    all_asked = asyncio.Barrier(2)

    async def hangs(timeout_s: float) -> bool:
        await all_asked.wait()
        return False

    for server in fleet.servers:
        server.answers = hangs
    fleet.sync_restarted = fleet.serve_as_loaded
    watch = asyncio.create_task(fleet.watch())
    async with asyncio.timeout(120):
        while [client.start for client in fleet.group.clients] != [1, 1]:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
    watch.cancel()
    await fleet.stop()


async def served_by(router: ScriptedRouter, fleet: Fleet) -> list[int]:
    """Return the number of restarts of each engine, once all serve again."""
    async with asyncio.timeout(120):
        while len(fleet.group.clients) < len(fleet.servers) or len(router.engines) < len(fleet.servers):  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
    assert sorted(router.engines) == sorted(fleet.group.urls)
    return [client.start for client in sorted(fleet.group.clients, key=lambda client: client.url)]


async def test_the_router_dies_with_an_engine(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    """The old router is not told that the engine is gone; the next one is."""
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log")
    fleet.sync_restarted = fleet.serve_as_loaded
    routers[0].alive = False
    fleet.group.clients[0].is_overdue = True
    assert await fleet.is_lost(fleet.group.clients[0])
    watch = asyncio.create_task(fleet.watch())
    async with asyncio.timeout(120):
        while len(routers) < 2:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
    assert await served_by(routers[1], fleet) == [1, 0]
    assert not watch.done()
    watch.cancel()
    await fleet.stop()


async def test_an_engine_that_dies_while_a_new_router_is_told_of_it(
    routers: list[ScriptedRouter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log")
    fleet.sync_restarted = fleet.serve_as_loaded
    victim = fleet.servers[0]

    async def launch(settings: RouterSettings) -> ScriptedRouter:
        routers.append(ScriptedRouter())
        routers[-1].refuses.add(victim.url)
        crash(victim)
        return routers[-1]

    monkeypatch.setattr(fleet_module, "launch_router", launch)
    routers[0].alive = False
    watch = asyncio.create_task(fleet.watch())
    async with asyncio.timeout(120):
        while victim in fleet.servers:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
    assert await served_by(routers[1], fleet) == [1, 0]
    assert not watch.done()
    watch.cancel()
    await fleet.stop()


async def test_a_router_that_refuses_an_engine_that_lives_ends_the_run(
    routers: list[ScriptedRouter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await fleet_of(["regular"], tmp_path / "log")
    monkeypatch.setattr(fleet.group.clients[0], "scheduler_answers", AsyncMock(return_value=True))
    routers[0].refuses.add(fleet.servers[0].url)
    with pytest.raises(EngineError, match="was not added by the router"):
        await fleet.admit(fleet.group.clients)
    await fleet.stop()


async def test_without_restarts_the_engine_that_was_too_late_is_named(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log", restart=False)
    fleet.group.clients[1].is_overdue = True
    with pytest.raises(EngineError, match=r"engine 1 .* does not answer; .* with --use-fault-tolerance it would have been restarted"):
        await fleet.check_alive()


async def test_engines_that_are_restarted_are_not_to_blame(routers: list[ScriptedRouter], tmp_path: Path) -> None:
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log")
    crash(fleet.servers[1])
    await fleet.check_alive()


async def test_an_engine_that_waits_for_weights_and_never_takes_them_ends_the_run(
    routers: list[ScriptedRouter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine could wait for the next weight sync as long as another one served."""
    monkeypatch.setattr(fleet_module, "MAX_RESTARTS", 1)
    fleet = await fleet_of(["regular", "regular"], tmp_path / "log")
    waiting, other = fleet.group.clients

    async def sync_restarted(client: EngineClient) -> bool:
        if client.url == waiting.url and not fleet.group.clients:
            raise EngineError("it refuses the weights")
        return False

    fleet.sync_restarted = sync_restarted
    waiting.is_overdue = True
    assert await fleet.is_lost(waiting)
    watch = asyncio.create_task(fleet.watch())
    async with asyncio.timeout(120):
        while not fleet.group.joining or not fleet.is_settled:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
        other.is_overdue = True
        assert await fleet.is_lost(other)
        with pytest.raises(EngineError, match="cannot restart engine 0: it died 2 times"):
            await watch
    await fleet.stop()
