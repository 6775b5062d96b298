"""--colocate with --use-fault-tolerance: an engine that dies restarts while the trainer is off its devices, and serves with the right
weights; whenever it dies, the run goes on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from fuligo.engines.host import PortClaims
from fuligo.engines.sglang import fleet as fleet_module
from fuligo.engines.sglang.fleet import Fleet
from fuligo.engines.sglang.router import RouterSettings
from fuligo.engines.sglang.server import ServerSettings
from fuligo.formats.payload import SHARED_MEMORY
from fuligo.formats.weight_manifest import WeightManifest, WeightTarget
from fuligo.job.colocated import ColocatedDevices, ColocatedTrainer, ColocatedWeightSync
from fuligo.job.watch import while_watching
from fuligo.trainer.protocol import Trainer
from fuligo.types import StepResult, TrainBatch, TrainSample
from fuligo.weights.sync import WeightSync, WeightSyncSettings
from tests.unit.weights.dying_engine import DyingServer, Fault, Held, plan
from tests.unit.weights.test_sync import OneRank, Router, fleet_settings

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a POSIX shared memory file system")
BATCH, RESULT = cast(TrainBatch, None), cast(StepResult, None)


class TrainerOnDevices(OneRank):
    """Server that checks that there is memory for it."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet: Fleet
        self.is_on = False
        self.num_turns = 0
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        """Called in the next training."""
        self.sending: asyncio.Event | None = None
        """Set when weights begin to be sent."""
        self.engines_may_come_up = asyncio.Event()
        self.engines_may_come_up.set()

    async def onload(self) -> None:
        for server in self.fleet.servers:
            if server.alive:
                assert "kv_cache" in (await Held.of(server.url)).released, f"{server.settings.name} has what the trainer needs"
        self.is_on = True
        self.num_turns += 1

    async def offload(self) -> None:
        self.is_on = False

    async def train(self, batch: TrainBatch) -> StepResult:
        assert self.is_on
        number = self.num_updates + 1.0
        self.set(a=number, b=2 * number, c=3 * number)
        if self.meanwhile is not None:
            await self.meanwhile()
        self.meanwhile = None
        return RESULT

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        for _ in range(10):
            assert self.is_on
            await asyncio.sleep(0.02)
        return samples

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        if self.sending is not None:
            self.sending.set()
            await asyncio.sleep(0.1)
        return await super().send_weights(target)

    def start(self, settings: ServerSettings) -> DyingServer:
        assert not self.is_on, "an engine sizes its cache by what is free"
        return SlowServer(settings, self.engines_may_come_up)


class SlowServer(DyingServer):
    def __init__(self, settings: ServerSettings, may_come_up: asyncio.Event) -> None:
        super().__init__(settings)
        self._may_come_up = may_come_up

    async def wait_ready(self) -> None:
        await self._may_come_up.wait()
        await super().wait_ready()


class World:
    """World after its first weight sync."""

    def __init__(self, fleet: Fleet, router: Router, trainer: TrainerOnDevices, directory: Path) -> None:
        self.fleet, self.router, self.own_trainer = fleet, router, trainer
        trainer.fleet = fleet
        devices = ColocatedDevices(fleet.group, keep_weights=False)
        devices.attach(cast(Trainer, trainer), is_loaded=False)
        self.trainer = ColocatedTrainer(cast(Trainer, trainer), devices)
        settings = WeightSyncSettings("tensor", 16, False, directory, directory)
        weight_sync = WeightSync(self.trainer, fleet.group, settings, devices=devices)
        self.weight_sync = ColocatedWeightSync(weight_sync, fleet.group, devices)
        fleet.sync_restarted, fleet.devices = self.weight_sync.sync_restarted, devices

    async def step(self, *, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """Train and sync."""
        self.own_trainer.meanwhile = meanwhile
        await self.trainer.train(BATCH)
        await self.weight_sync.sync()

    async def kill(self, number: int) -> None:
        """Kill an engine, and wait until the fleet has noticed."""
        server = self.fleet.servers[number]
        assert isinstance(server, DyingServer)
        server.kill()
        await self.until(lambda: server.url not in (*self.fleet.group.urls, *self.router.engines))

    @property
    def serving(self) -> set[str]:
        return set(self.fleet.group.urls) & set(self.router.engines)

    @property
    def waiting(self) -> set[str]:
        """URLs of the engines that wait for weights."""
        return {client.url for client in self.fleet.group.joining}

    async def take_up(self, num_engines: int) -> None:
        """Run steps until all engines serve again."""
        for _ in range(2):
            await self.step()
            await self.until(lambda: len(self.serving | self.waiting) == num_engines)
        await self.step()
        await self.assert_serving(*range(num_engines))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.02)

    async def assert_serving(self, *numbers: int) -> None:
        """Check that only these engines serve, with the trainer's weights and all of their memory."""
        urls = {self.fleet.servers[number].url for number in numbers}
        assert (set(self.fleet.group.urls), set(self.router.engines)) == (urls, urls)
        for url in urls:
            held = await Held.of(url)
            assert (held.version, held.weights) == (self.weight_sync.version, self.own_trainer.expected)
            assert (held.paused, held.released) == (False, [])
        assert not self.own_trainer.is_on


Open = Callable[..., Any]


@pytest.fixture
def open_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    router, trainer = Router(), TrainerOnDevices()

    async def launch_router(settings: RouterSettings) -> Router:
        return router

    monkeypatch.setattr(fleet_module, "launch_router", launch_router)
    monkeypatch.setattr(fleet_module, "WATCH_S", 0.05)

    @asynccontextmanager
    async def open_world(num_engines: int, faults: dict[int, Fault] | None = None, *, call_timeout_s: float = 30.0) -> AsyncIterator[World]:
        with PortClaims() as claims:
            settings = fleet_settings(tmp_path, claims, num_engines=num_engines, call_timeout_s=call_timeout_s)
            for number, fault in (faults or {}).items():
                plan(settings.servers[number], fault)
            fleet = await Fleet.launch(settings, trainer.start)
            world = World(fleet, router, trainer, tmp_path)
            try:
                async with while_watching(fleet.watch()), asyncio.timeout(120):
                    await world.weight_sync.resync()
                    yield world
            finally:
                await fleet.stop()

    return open_world


async def test_one_that_dies_while_the_others_sample(open_world: Open) -> None:
    """The engine restarts at once, and the trainer waits for it; the next weight sync brings its weights without ending other requests."""
    async with open_world(2) as world:
        await world.kill(0)
        await world.assert_serving(1)
        await world.until(lambda: world.waiting == {world.fleet.servers[0].url})
        await world.assert_serving(1)
        await world.step()
        await world.assert_serving(0, 1)
        assert [held.served_unpaused for held in [await Held.of(server.url) for server in world.fleet.servers]] == [[1, 1], [0, 0, 1, 1]]


async def test_the_trainer_waits_for_an_engine_that_is_starting(open_world: Open) -> None:
    async with open_world(2) as world:
        dead = world.fleet.servers[0]
        world.own_trainer.engines_may_come_up.clear()
        await world.kill(0)
        await world.until(lambda: world.fleet.servers[0] is not dead)
        step = asyncio.create_task(world.step())
        await asyncio.sleep(0.3)
        assert not world.own_trainer.is_on
        world.own_trainer.engines_may_come_up.set()
        await step
        await world.assert_serving(0, 1)


async def test_one_that_dies_while_the_trainer_works(open_world: Open) -> None:
    """Nothing starts before the trainer is offloaded."""
    async with open_world(2) as world:
        await world.step(meanwhile=lambda: world.kill(0))
        await world.assert_serving(1)
        await world.until(lambda: world.waiting == {world.fleet.servers[0].url})
        await world.step()
        await world.assert_serving(0, 1)


async def test_the_only_one_dies_while_it_samples(open_world: Open) -> None:
    """The engine gets its weights at once, because no other serves the rollout."""
    async with open_world(1) as world:
        await world.step()
        await world.kill(0)
        await world.until(lambda: bool(world.serving))
        await world.assert_serving(0)
        await world.step()
        await world.assert_serving(0)


async def test_the_trainers_work_waits_until_the_only_one_has_its_weights(open_world: Open) -> None:
    async with open_world(1) as world:
        world.own_trainer.sending = asyncio.Event()
        await world.kill(0)
        await world.own_trainer.sending.wait()
        await world.trainer.score([])
        assert world.serving
        await world.step()
        await world.assert_serving(0)


async def test_the_only_one_dies_while_the_trainer_works(open_world: Open) -> None:
    """The trainer leaves the devices once more before the weight sync."""
    async with open_world(1) as world:
        await world.step(meanwhile=lambda: world.kill(0))
        await world.assert_serving(0)


async def test_all_die_while_they_sample(open_world: Open) -> None:
    """The first engine waits for those that are starting, so that the trainer is loaded once."""
    async with open_world(3) as world:
        dead = world.fleet.servers
        world.own_trainer.engines_may_come_up.clear()
        await asyncio.gather(*(world.kill(number) for number in range(3)))
        await world.until(lambda: not any(server in dead for server in world.fleet.servers))
        world.own_trainer.engines_may_come_up.set()
        await world.until(lambda: len(world.serving) == 3)
        await world.assert_serving(0, 1, 2)


async def test_one_that_waits_for_weights_gets_them_when_the_last_other_dies(open_world: Open) -> None:
    async with open_world(2) as world:
        await world.kill(0)
        await world.until(lambda: bool(world.waiting))
        await world.kill(1)
        await world.until(lambda: world.waiting == {world.fleet.servers[1].url})
        await world.assert_serving(0)
        await world.step()
        await world.assert_serving(0, 1)


async def test_the_last_other_dies_while_the_trainer_works(open_world: Open) -> None:
    """A weight sync is about to begin, so nothing moves before it."""
    async with open_world(2) as world:
        await world.kill(0)
        await world.until(lambda: bool(world.waiting))
        num_turns = world.own_trainer.num_turns
        await world.step(meanwhile=lambda: world.kill(1))
        assert world.own_trainer.num_turns == num_turns + 1
        await world.assert_serving(0)


CALLS = ["/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_tensor", "/model_info"]


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("path", CALLS)
async def test_a_death_in_the_middle_of_a_turn(open_world: Open, path: str, num_engines: int) -> None:
    """The only engine, or one of two, dies at every call of a turn."""
    async with open_world(num_engines, {0: Fault(path, "dies")}) as world:
        await world.take_up(num_engines)


@pytest.mark.long
# A hang is a death after a timeout; the test above has one at every call.
@pytest.mark.parametrize("path", ["/release_memory_occupation", pytest.param("/resume_memory_occupation", marks=pytest.mark.slow)])
async def test_an_engine_that_hangs_in_the_middle_of_a_turn(open_world: Open, path: str) -> None:
    async with open_world(2, {0: Fault(path, "hangs")}, call_timeout_s=4.0) as world:
        await world.take_up(2)


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/update_weights_from_tensor", "/resume_memory_occupation"])
async def test_one_that_dies_again_on_the_way_to_its_weights(open_world: Open, path: str) -> None:
    async with open_world(1) as world:
        plan(world.fleet.servers[0].settings, Fault(path, "dies"))
        await world.kill(0)
        await world.until(lambda: bool(world.serving))
        await world.assert_serving(0)
        await world.step()
        await world.assert_serving(0)
