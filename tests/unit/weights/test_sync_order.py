"""Order of a weight sync: no request samples from partly updated, unsent or outdated weights."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fuligo.engines.client import EngineClient
from fuligo.engines.engine import PauseMode
from fuligo.engines.generation import ModelInfo
from fuligo.engines.group import EngineGroup
from fuligo.errors import WeightSyncError
from fuligo.formats.weight_manifest import WeightManifest, WeightTarget
from fuligo.weights.sync import WeightSync, WeightSyncSettings


class Engine(EngineClient):
    """Recorder of the calls it receives."""

    def __init__(self, url: str, told: list[str]) -> None:
        super().__init__(url)
        self.told = told
        self.version = 0
        self.hears = True
        self.modes: list[PauseMode] = []

    async def pause(self, mode: PauseMode) -> None:
        self.told.append(f"pause {self.url}")
        self.modes.append(mode)

    async def resume(self) -> None:
        self.told.append(f"resume {self.url}")

    async def model_info(self) -> ModelInfo:
        await asyncio.sleep(0)
        return ModelInfo("model", self.version)


class OneTrainer:
    """Trainer that sends its weights to engines in this process."""

    def __init__(self, engines: dict[str, Engine], told: list[str]) -> None:
        self.engines, self.told = engines, told
        self.num_updates = 0
        self.trains_meanwhile = False
        self.unconfirmed: tuple[str, ...] = ()

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        self.told.append(f"begin {target.version}")
        self.num_updates += self.trains_meanwhile
        await asyncio.sleep(0.01)
        for address in target.engines:
            engine = self.engines[address.url]
            engine.version = target.version if engine.hears else engine.version
        self.told.append(f"end {target.version}")
        return WeightManifest(target.version, 1, 4, None, 4, unconfirmed=self.unconfirmed)


class Members:
    def __init__(self) -> None:
        self.admitted: list[EngineClient] = []

    async def is_lost(self, client: EngineClient) -> bool:
        return False

    async def admit(self, clients: Any) -> None:
        self.admitted += clients


class Proof:
    """Check that fails if the trainer's weights have changed since they were sent, as log-probabilities then do."""

    def __init__(self, trainer: OneTrainer) -> None:
        self.trainer = trainer
        self.trains_meanwhile = False
        self.fails = False

    async def check(self, engines: EngineGroup, manifest: WeightManifest) -> None:
        self.trainer.num_updates += self.trains_meanwhile
        if self.trains_meanwhile or self.fails:
            raise WeightSyncError("log-probabilities differ")


class World:
    def __init__(self, pause: PauseMode = "abort") -> None:
        self.told: list[str] = []
        self.engines = {url: Engine(url, self.told) for url in ("http://a", "http://b", "http://restarted")}
        self.a, self.b, self.restarted = self.engines.values()
        self.members = Members()
        self.group = EngineGroup([self.a, self.b], membership=self.members)
        self.trainer = OneTrainer(self.engines, self.told)
        self.proof = Proof(self.trainer)
        settings = WeightSyncSettings("tensor", 1024, False, Path(), Path(), pause=pause)
        self.weight_sync = WeightSync(self.trainer, self.group, settings, proof=self.proof)

    def restart(self) -> None:
        self.group.joining.append(self.restarted)


async def test_all_pause_before_the_first_byte_and_resume_after_the_last() -> None:
    world = World()
    assert await world.weight_sync.sync() == 1
    assert sorted(world.told[:2]) == ["pause http://a", "pause http://b"]
    assert world.told[2:4] == ["begin 1", "end 1"]
    assert sorted(world.told[4:]) == ["resume http://a", "resume http://b"]


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_every_sync_pauses_in_the_mode_of_the_run(mode: PauseMode) -> None:
    world = World(mode)
    await world.weight_sync.resync()
    await world.weight_sync.sync()
    assert world.a.modes == world.b.modes == [mode, mode]


@pytest.mark.parametrize("is_checked", [False, True])
async def test_ranks_that_do_not_answer_are_warned_of_once_unless_weights_are_checked(
    caplog: pytest.LogCaptureFixture, is_checked: bool
) -> None:
    world = World()
    world.trainer.unconfirmed = ("http://b",)
    if not is_checked:
        world.weight_sync._proof = None
    await world.weight_sync.sync()
    await world.weight_sync.sync()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (0 if is_checked else 1)
    assert all(text.startswith("http://b: ") and "--check-weight-update-equal" in text for text in warnings)


async def test_no_engine_resumes_if_one_has_another_version() -> None:
    world = World()
    world.b.hears = False
    with pytest.raises(WeightSyncError, match="engine http://b reports weight version 0 after version 1 was sent"):
        await world.weight_sync.sync()
    assert not [told for told in world.told if told.startswith("resume")]
    assert world.weight_sync.version == 0


async def test_a_sync_waits_for_a_restarted_engine_that_is_being_renewed() -> None:
    world = World()
    await world.weight_sync.sync()
    world.restart()
    world.told.clear()
    renewed, version = await asyncio.gather(world.weight_sync.sync_restarted(world.restarted), world.weight_sync.sync())
    assert (renewed, version) == (True, 2)
    assert world.told[:4] == ["pause http://restarted", "begin 1", "end 1", "resume http://restarted"]
    assert sorted(world.told[4:7]) == ["pause http://a", "pause http://b", "pause http://restarted"]
    assert world.told[7:9] == ["begin 2", "end 2"]


async def test_a_restarted_engine_gets_only_the_weights_of_the_version() -> None:
    world = World()
    await world.weight_sync.sync()
    world.restart()
    world.told.clear()
    assert await world.weight_sync.sync_restarted(world.restarted)
    assert world.told == ["pause http://restarted", "begin 1", "end 1", "resume http://restarted"]
    assert world.members.admitted == [world.restarted]
    assert (world.group.clients, world.group.joining) == ([world.a, world.b, world.restarted], [])


@pytest.mark.parametrize("while_they_are_sent", [False, True])
async def test_weights_that_were_trained_since_are_not_sent_as_the_version_before(while_they_are_sent: bool) -> None:
    world = World()
    world.trainer.trains_meanwhile = while_they_are_sent
    await world.weight_sync.sync()
    world.trainer.num_updates += not while_they_are_sent
    world.trainer.trains_meanwhile = False
    world.restart()
    assert not await world.weight_sync.sync_restarted(world.restarted)
    assert (world.restarted.version, world.members.admitted) == (0, [])
    assert await world.weight_sync.sync() == 2, "the next sync includes it"
    assert (world.restarted.version, world.members.admitted) == (2, [world.restarted])


@pytest.mark.parametrize("trains", ["while weights are sent", "while they are checked"])
async def test_a_trainer_that_begins_to_train_leaves_a_restarted_engine_to_the_next_sync(trains: str) -> None:
    """The engine may hold newer weights under the old version, and log-probabilities differ for a good reason."""
    world = World()
    await world.weight_sync.sync()
    world.restart()
    world.trainer.trains_meanwhile = trains == "while weights are sent"
    world.proof.trains_meanwhile = trains == "while they are checked"
    assert not await world.weight_sync.sync_restarted(world.restarted)
    assert (world.members.admitted, world.group.joining) == ([], [world.restarted])
    world.trainer.trains_meanwhile = world.proof.trains_meanwhile = False
    assert await world.weight_sync.sync() == 2
    assert (world.restarted.version, world.members.admitted) == (2, [world.restarted])


async def test_a_restarted_engine_that_differs_from_the_trainer_ends_the_run() -> None:
    world = World()
    await world.weight_sync.sync()
    world.restart()
    world.proof.fails = True
    with pytest.raises(WeightSyncError, match="differ"):
        await world.weight_sync.sync_restarted(world.restarted)
    assert world.members.admitted == []
