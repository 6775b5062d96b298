"""A weight sync survives engines that die or hang (--use-fault-tolerance) on every transport; other failures end it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fuligo.engines.client import EngineClient
from fuligo.engines.connection import ControlDeadlines, Deadline
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang import fleet as fleet_module
from fuligo.engines.sglang.fleet import Fleet, FleetSettings
from fuligo.engines.sglang.router import RouterSettings
from fuligo.engines.sglang.server import ServerPorts, ServerSettings
from fuligo.errors import EngineError, TrainerError
from fuligo.formats.payload import SHARED_MEMORY
from fuligo.formats.weight_manifest import Transport, WeightManifest, WeightTarget
from fuligo.trainer.protocol import Trainer
from fuligo.trainer.ranks.commands import Command
from fuligo.trainer.ranks.trainer import RankedTrainer
from fuligo.weights import broadcast, colocated
from fuligo.weights.broadcast import BroadcastGroup
from fuligo.weights.senders import WeightSender
from fuligo.weights.sync import WeightSync, WeightSyncSettings
from tests.unit.engines.test_fleet import ScriptedRouter
from tests.unit.weights.dying_engine import DyingServer, Fault, Held, plan, streams_file

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a POSIX shared memory file system")
CALL = {
    "tensor": "/update_weights_from_tensor",
    "gloo": "/update_weights_from_distributed",
    "disk": "/update_weights_from_disk",
}


class OneRank(RankedTrainer):
    """Trainer with three tensors that sends them like any trainer."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.weights = {name: torch.zeros(4) for name in "abc"}
        self.sender = WeightSender()
        self.num_gathered = 0
        """Number of sends that consumed every tensor, so that other ranks would not wait in a collective."""
        self.manifests: list[WeightManifest] = []

    def set(self, **weights: float) -> None:
        self.num_updates += 1
        self.weights |= {name: torch.full((4,), value) for name, value in weights.items()}

    @property
    def expected(self) -> dict[str, list[float]]:
        return {name: tensor.tolist() for name, tensor in self.weights.items()}

    async def _run(self, command: Command[Any]) -> Any:
        assert command.name == "send_weights"
        return await asyncio.to_thread(self._send, *command.arguments)

    def _send(self, target: WeightTarget) -> Any:
        def gathered():
            yield from self.weights.items()
            self.num_gathered += 1

        sent = self.sender.send(gathered(), target)
        if isinstance(sent, WeightManifest):
            self.manifests.append(sent)
        return sent


class Router(ScriptedRouter):
    """Fleet that records the weights an engine holds when requests begin to reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.enlisted: list[tuple[str, Held]] = []

    async def add(self, url: str, key: str, **how: object) -> None:
        await super().add(url, key, **how)
        self.enlisted.append((url, await Held.of(url)))


class World:
    """Engines, their fleet, a trainer and the weight sync between them."""

    def __init__(self, fleet: Fleet, router: Router, transport: Transport, directory: Path, *, changes_only: bool) -> None:
        self.fleet, self.router = fleet, router
        self.trainer = OneRank()
        settings = WeightSyncSettings(transport, 16, changes_only, directory, directory)  # one bucket per tensor
        self.weight_sync = WeightSync(cast(Trainer, self.trainer), fleet.group, settings)
        fleet.sync_restarted = self.weight_sync.sync_restarted

    async def held(self) -> list[Held]:
        """Check the weights of every engine once none is restarting."""
        while len(self.fleet.group.clients) < len(self.fleet.servers):  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.02)
        return [await Held.of(server.url) for server in self.fleet.servers]

    async def assert_all_serve(self, version: int) -> None:
        for held in await self.held():
            assert (held.weights, held.version, held.paused) == (self.trainer.expected, version, False)
            assert held.served_unpaused == sorted(held.served_unpaused)
        assert sorted(self.router.engines) == sorted(server.url for server in self.fleet.servers)


Open = Callable[..., Any]


def fleet_settings(
    directory: Path,
    claims: PortClaims,
    *,
    num_engines: int,
    restart: bool = True,
    call_timeout_s: float = 60.0,
    health_timeout_s: float = 60.0,  # seconds pass on a busy machine before a healthy engine answers
) -> FleetSettings:
    servers = tuple(
        ServerSettings(
            name=f"engine {number}",
            model_path="model",
            tp_size=1,
            pp_size=1,
            arguments={},
            worker_type="regular",
            device="cpu",
            host="127.0.0.1",
            ports=ServerPorts(claims.claim(), 1, 1),
            log_file=directory / f"engine-{number}.txt",
            number=number,
        )
        for number in range(num_engines)
    )
    within = Deadline(call_timeout_s)
    router = RouterSettings(directory / "log", "host", 1, 2)
    return FleetSettings(servers, router, restart, 1.0, health_timeout_s, 0, 60.0, ControlDeadlines(within, within, within))


@pytest.fixture
def open_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    router = Router()

    async def launch_router(settings: RouterSettings) -> Router:
        return router

    monkeypatch.setattr(fleet_module, "launch_router", launch_router)
    monkeypatch.setattr(fleet_module, "WATCH_S", 0.05)

    @asynccontextmanager
    async def open_world(
        transport: Transport,
        faults: dict[int, Fault],
        *,
        num_engines: int = 3,
        restart: bool = True,
        changes_only: bool = False,
        call_timeout_s: float = 60.0,
        health_timeout_s: float = 60.0,
        streaming: Sequence[int] = (),
    ) -> AsyncIterator[World]:
        before = set(SHARED_MEMORY.glob("*fuligo*"))
        with PortClaims() as claims:
            deadlines = {"call_timeout_s": call_timeout_s, "health_timeout_s": health_timeout_s}
            settings = fleet_settings(tmp_path, claims, num_engines=num_engines, restart=restart, **deadlines)
            if any(fault.how == "hangs" for fault in faults.values()):
                # An engine that works must leave even where the machine is busy, since others may wait for it in the group.
                monkeypatch.setattr(broadcast, "LEAVE_TIMEOUT_S", 2.0)
            for number in streaming:
                streams_file(settings.servers[number]).touch()
            for number, fault in faults.items():
                plan(settings.servers[number], fault)
            fleet = await Fleet.launch(settings, DyingServer)
            watch = asyncio.create_task(fleet.watch())
            world = World(fleet, router, transport, tmp_path, changes_only=changes_only)
            try:
                async with asyncio.timeout(120):
                    yield world
                assert not watch.done() or not restart
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                await asyncio.to_thread(world.trainer.sender.close)
                await fleet.stop()
        assert set(SHARED_MEMORY.glob("*fuligo*")) == before

    return open_world


@pytest.mark.parametrize("transport", ["tensor", "gloo", "disk"])
async def test_an_engine_that_dies_comes_back_and_all_have_the_weights(open_world: Open, transport: Transport) -> None:
    """Two engines received part of the weights; the third dies midway."""
    call = 1 if transport == "disk" else 2
    async with open_world(transport, {0: Fault(CALL[transport], "dies", call)}) as world:
        world.trainer.set(a=1.0, b=2.0, c=3.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)
        first, *others = await world.held()
        assert first.served_unpaused == [1]
        assert all(other.served_unpaused[0] == 1 for other in others), "none goes on with a part of the weights"
        back = [held for url, held in world.router.enlisted if url == world.fleet.servers[0].url][-1]
        assert (back.version, back.weights) == (1, world.trainer.expected), "requests reach it when it has them"

        world.trainer.set(b=4.0)
        assert await world.weight_sync.sync() == 2
        await world.assert_all_serve(2)


async def test_death_while_engines_join(open_world: Open) -> None:
    """Peers that wait for the engine, and ranks that gather weights, stop waiting."""
    async with open_world("gloo", {1: Fault("/init_weights_update_group", "dies")}) as world:
        world.trainer.set(a=1.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)
        assert world.trainer.num_gathered >= 2


@pytest.mark.long
async def test_an_engine_that_hangs_in_the_broken_group_is_restarted_too(open_world: Open) -> None:
    """Engines whose NCCL waits for a dead peer answer /health but nothing that needs their scheduler."""
    faults = {0: Fault(CALL["gloo"], "dies", 2), 1: Fault("/destroy_weights_update_group", "hangs", 2)}
    async with open_world("gloo", faults, health_timeout_s=2.0) as world:
        start = [client.start for client in world.fleet.group.clients]
        world.trainer.set(a=1.0, b=2.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)
        assert (start, sorted(client.start for client in world.fleet.group.clients)) == ([0, 0, 0], [0, 1, 1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "path"),
    [
        ("tensor", "/pause_generation"),
        pytest.param("disk", CALL["disk"], marks=pytest.mark.slow),  # a call with the deadline of the one above
        ("tensor", CALL["tensor"]),
        ("gloo", CALL["gloo"]),
    ],
)
async def test_an_engine_whose_scheduler_hangs_is_restarted(
    open_world: Open, monkeypatch: pytest.MonkeyPatch, transport: Transport, path: str
) -> None:
    """Its HTTP server still answers; only the timeout of a call reveals the hang."""
    soon_s = 2.0
    soon = ControlDeadlines(bucket=Deadline(soon_s))
    monkeypatch.setattr(colocated, "client_of", lambda engine: EngineClient(engine.url, number=engine.number, deadlines=soon))
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=soon_s))
    hangs = {0: Fault(path, "hangs")}
    async with open_world(transport, hangs, num_engines=1, call_timeout_s=soon_s, health_timeout_s=soon_s) as world:
        world.trainer.set(a=1.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)
        assert [client.start for client in world.fleet.group.clients] == [1]


@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_where_all_die_the_sync_waits_for_one_that_comes_back(open_world: Open, transport: Transport) -> None:
    fault = Fault(CALL[transport], "dies")
    async with open_world(transport, {0: fault, 1: fault}, num_engines=2) as world:
        world.trainer.set(a=1.0)
        assert await world.weight_sync.sync() == 1
        assert world.fleet.group.clients
        await world.assert_all_serve(1)


@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_a_restarted_engine_that_refuses_is_not_lost(open_world: Open, transport: Transport) -> None:
    async with open_world(transport, {0: Fault(CALL[transport], "dies")}, num_engines=1) as world:
        plan(world.fleet.servers[0].settings, Fault(CALL[transport], "refuses"))
        with pytest.raises(EngineError, match="no room"):
            await world.weight_sync.sync()


@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_a_restarted_engine_that_dies_again_on_the_way_to_its_weights(open_world: Open, transport: Transport) -> None:
    async with open_world(transport, {0: Fault(CALL[transport], "dies", 2)}) as world:
        plan(world.fleet.servers[0].settings, Fault(CALL[transport], "dies", 1))
        world.trainer.set(a=1.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)


@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_only_changes_go_to_engines_that_have_the_rest(open_world: Open, transport: Transport) -> None:
    """After a failed weight sync the engines' weights are unknown."""
    async with open_world(transport, {0: Fault(CALL[transport], "dies", 4)}, changes_only=True) as world:
        world.trainer.set(a=1.0, b=2.0, c=3.0)
        await world.weight_sync.sync()
        world.trainer.set(b=4.0)
        await world.weight_sync.sync()
        await world.assert_all_serve(2)
        assert {manifest.num_bytes_sent for manifest in world.trainer.manifests} == {48}
        came_back_alone = len(world.trainer.manifests) == 3  # else in time for what was sent anew
        for version, num_bytes in ((3, 48 if came_back_alone else 16), (4, 16)):
            world.trainer.set(c=float(version))
            await world.weight_sync.sync()
            await world.assert_all_serve(version)
            assert world.trainer.manifests[-1].num_bytes_sent == num_bytes


@pytest.mark.parametrize("transport", ["tensor", "gloo", "disk"])
async def test_a_refusal_is_no_death(open_world: Open, transport: Transport) -> None:
    """The error ends the weight sync; the trainer has gathered all weights and can send them again."""
    async with open_world(transport, {0: Fault(CALL[transport], "refuses")}) as world:
        with pytest.raises(EngineError, match="no room"):
            await world.weight_sync.sync()
        assert (world.weight_sync.version, world.trainer.num_gathered, len(world.fleet.group.clients)) == (0, 1, 3)
        assert [held.served_unpaused for held in await world.held()] == [[], [], []], "none samples with a part of the weights"
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)


async def test_a_refusal_before_the_sender_has_sent_is_no_death(open_world: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's part fails after the engine's, as on a busy machine; engines that wait for it get an error when the group is closed."""
    closing = threading.Event()
    send, close = dist.broadcast, BroadcastGroup.close

    def fails_late(*arguments: Any, **named: Any) -> None:
        if closing.is_set():  # the next weight sync
            send(*arguments, **named)
        else:
            closing.wait(100)
            raise RuntimeError("the group was aborted")

    def close_before(group: BroadcastGroup) -> None:
        closing.set()
        close(group)

    monkeypatch.setattr(dist, "broadcast", fails_late)
    monkeypatch.setattr(BroadcastGroup, "close", close_before)
    async with open_world("gloo", {0: Fault(CALL["gloo"], "refuses")}) as world:
        with pytest.raises(EngineError, match="no room"):
            await world.weight_sync.sync()
        assert [client.start for client in world.fleet.group.clients] == [0, 0, 0]
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)


async def test_a_restarted_engine_waits_for_the_next_trainer_if_this_one_has_failed(open_world: Open) -> None:
    async with open_world("tensor", {}, num_engines=2) as world:
        await world.weight_sync.sync()
        [first, _] = world.fleet.servers

        async def fail(command: Command[Any]) -> Any:
            raise TrainerError("cannot send_weights: the trainer has already failed")

        world.trainer._run = fail
        first.kill()
        while not world.fleet.group.joining:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)

        trainer = OneRank()
        trainer.set(a=1.0, b=2.0, c=3.0)
        weights = WeightSync(cast(Trainer, trainer), world.fleet.group, world.weight_sync._settings, version=1)
        await weights.resync()
        world.trainer = trainer
        await world.assert_all_serve(1)


@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_without_fault_tolerance_a_death_ends_the_sync(open_world: Open, transport: Transport) -> None:
    async with open_world(transport, {0: Fault(CALL[transport], "dies")}, restart=False) as world:
        with pytest.raises(EngineError, match=world.fleet.servers[0].url):
            await world.weight_sync.sync()
        assert world.trainer.num_gathered == 1
