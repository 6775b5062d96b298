"""Trainer and engines on the same devices: scripted parts check at every call what is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fuligo.formats.weight_manifest import WeightManifest, WeightTarget
from fuligo.job.colocated import ColocatedDevices, ColocatedTrainer, ColocatedWeightSync

TARGET = WeightTarget("tensor", 1, 1)
MANIFEST = WeightManifest(1, 1, 1, None)


class Device:
    """Device that records what it holds and the order of calls."""

    def __init__(self) -> None:
        self.holds = {"weights", "kv_cache"}
        self.weights_are_good = True
        self.calls: list[str] = []


class Group:
    """Engine group without losses."""

    is_settled = True

    async def control(self, call: Callable[[Group], Awaitable[None]]) -> None:
        await call(self)


class Engines(Group):
    def __init__(self, device: Device) -> None:
        self.device = device

    async def pause(self, mode: str) -> None:
        self.device.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.device.calls.append("resume")

    async def release_memory(self, tag: str) -> None:
        self.device.calls.append(f"release {tag}")
        assert tag in self.device.holds
        self.device.holds.discard(tag)
        if tag == "weights":
            self.device.weights_are_good = False

    async def resume_memory(self, tag: str) -> None:
        self.device.calls.append(f"take {tag}")
        assert not (tag == "kv_cache" and "trainer" in self.device.holds), "too much for the device"
        self.device.holds.add(tag)

    def sample(self) -> None:
        assert self.device.holds == {"weights", "kv_cache"}
        assert self.device.weights_are_good


class Trainer:
    num_updates = 0

    def __init__(self, device: Device) -> None:
        self.device = device

    async def onload(self) -> None:
        self.device.calls.append("onload")
        assert "kv_cache" not in self.device.holds, "too much for the device"
        self.device.holds.add("trainer")

    async def offload(self) -> None:
        self.device.calls.append("offload")
        self.device.holds.discard("trainer")

    async def _work(self, name: str) -> None:
        self.device.calls.append(name)
        assert "trainer" in self.device.holds

    async def score(self, samples: list) -> list:
        await self._work("score")
        return samples

    async def logprobs(self, samples: list) -> list:
        await self._work("logprobs")
        return samples

    async def train(self, batch: object) -> None:
        await self._work("train")

    async def save(self, directory: Path) -> None:
        await self._work("save")

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        await self._work("send")
        assert "weights" in self.device.holds
        self.device.weights_are_good = True
        return MANIFEST


class RecordedSync:
    """Weight sync with the calls of `WeightSync`, in their order."""

    def __init__(self, trainer: ColocatedTrainer, devices: ColocatedDevices, prove: Callable[[], Awaitable[None]] | None = None) -> None:
        self.trainer, self.devices, self.prove = trainer, devices, prove

    async def sync(self) -> int:
        await self.trainer.send_weights(TARGET)
        await self.devices.to_engines()
        if self.prove is not None:
            await self.prove()
        return 1


class OtherModel(Group):
    """Engines of a model that is never synced."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def release_memory(self) -> None:
        self.calls.append("release all")

    async def resume_memory(self) -> None:
        self.calls.append("take all")


class Parts:
    def __init__(self, *, keep_weights: bool = False) -> None:
        self.device = Device()
        self.engines = Engines(self.device)
        self.other = OtherModel()
        self.devices = ColocatedDevices(self.engines, keep_weights=keep_weights, others=[self.other])  # type: ignore[arg-type,list-item]
        self.devices.attach(Trainer(self.device), is_loaded=False)  # type: ignore[arg-type]
        self.trainer = ColocatedTrainer(Trainer(self.device), self.devices)  # type: ignore[arg-type]
        self.weight_sync = self.proven_by(None)

    def proven_by(self, prove: Callable[[], Awaitable[None]] | None) -> ColocatedWeightSync:
        return ColocatedWeightSync(RecordedSync(self.trainer, self.devices, prove), self.engines, self.devices)  # type: ignore[arg-type]


async def test_a_step_moves_each_part_once() -> None:
    parts = Parts()
    parts.engines.sample()
    await parts.trainer.score([])
    await parts.trainer.train(None)  # type: ignore[arg-type]
    await parts.weight_sync.sync()
    parts.engines.sample()
    assert parts.device.calls == [
        *("pause abort", "release kv_cache", "release weights", "onload"),
        *("score", "train"),
        *("take weights", "send"),
        *("offload", "take kv_cache", "resume"),
    ]
    assert parts.other.calls == ["pause abort", "release all", "take all", "resume"], "away from its release to the end of the weight sync"


async def test_a_checkpoint_after_the_sync_leaves_the_engines_their_weights() -> None:
    parts = Parts()
    await parts.trainer.save(Path())
    parts.engines.sample()
    assert parts.device.calls == ["pause abort", "release kv_cache", "onload", "save", "offload", "take kv_cache", "resume"]


async def test_a_proof_samples_and_scores_in_turns() -> None:
    parts = Parts()

    async def prove() -> None:
        parts.engines.sample()
        await parts.trainer.logprobs([])
        parts.engines.sample()

    await parts.trainer.train(None)  # type: ignore[arg-type]
    await parts.proven_by(prove).sync()
    parts.engines.sample()


async def test_engines_keep_their_weights_if_a_sync_sends_only_changes() -> None:
    parts = Parts(keep_weights=True)
    await parts.trainer.train(None)  # type: ignore[arg-type]
    await parts.devices.to_engines()
    parts.engines.sample()
    assert "release weights" not in parts.device.calls


async def test_engines_never_sample_from_weights_that_are_gone() -> None:
    parts = Parts()
    await parts.trainer.train(None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="cannot sample before a weight sync"):
        await parts.devices.to_engines()


class Restarted:
    """Client of an engine that has just started and holds all of its memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self, mode: str) -> None:
        self.calls.append("pause")

    async def release_memory(self, tag: str = "all") -> None:
        self.calls.append(f"release {tag}")


async def test_a_restarted_engine_holds_what_its_fellows_hold() -> None:
    parts = Parts()

    async def calls(group: Group) -> list[str]:
        client = Restarted()
        await parts.devices.align(client, group)  # type: ignore[arg-type]
        return client.calls

    assert await calls(parts.engines) == await calls(parts.other) == []
    await parts.devices.to_both()
    assert await calls(parts.engines) == ["pause", "release kv_cache"]
    await parts.devices.to_trainer()
    await parts.trainer.train(None)  # type: ignore[arg-type]
    assert await calls(parts.engines) == ["pause", "release kv_cache", "release weights"]
    assert await calls(parts.other) == ["pause", "release all"]


@pytest.mark.parametrize("moment", ["sampling", "training", "syncing"])
async def test_a_new_trainer_loads_while_the_engines_hold_nothing(moment: str) -> None:
    parts = Parts()
    if moment != "sampling":
        await parts.trainer.train(None)  # type: ignore[arg-type]
    if moment == "syncing":
        await parts.devices.to_both()
    parts.device.holds.discard("trainer")  # it is lost
    await parts.devices.detach()
    assert parts.device.holds == set()

    trainer = Trainer(parts.device)
    parts.device.holds.add("trainer")  # it loads
    parts.devices.attach(trainer, is_loaded=True)  # type: ignore[arg-type]
    await parts.weight_sync.sync()
    parts.engines.sample()
    await parts.trainer.score([])
    assert "trainer" in parts.device.holds


async def test_a_release_that_is_cancelled_is_finished_first() -> None:
    """Otherwise nobody would know what the engines hold."""
    parts = Parts()
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    release = parts.engines.release_memory

    async def slowly(tag: str) -> None:
        begun.set()
        await may_go_on.wait()
        await release(tag)

    parts.engines.release_memory = slowly  # type: ignore[method-assign]
    scoring = asyncio.create_task(parts.trainer.score([]))
    await begun.wait()
    scoring.cancel()
    asyncio.get_running_loop().call_later(0.02, may_go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert parts.device.holds == {"weights"}
    await parts.devices.detach()
    assert parts.device.holds == set()
