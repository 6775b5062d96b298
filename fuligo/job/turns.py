"""Trainer and engines on the same devices (--colocate): each gives its memory back while the other works.

The loop knows nothing of it: a trainer and a publisher that take turns stand where the real ones would.

    sampling              engines hold weights and KV cache, the trainer is offloaded
    score, train          the trainer is loaded, the engines hold nothing
    publish               the trainer is loaded, the engines hold weights to be overwritten
    save, logprobs        as in publish: the engines keep their weights
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fuligo.engines.client import MemoryTag
from fuligo.engines.group import EngineGroup
from fuligo.trainer.protocol import Trainer
from fuligo.types import FloatArray, StepResult, TrainBatch, TrainSample
from fuligo.weights.manifest import WeightManifest, WeightTarget
from fuligo.weights.proof import EqualityProof
from fuligo.weights.publisher import WeightPublisher


class Turns:
    """Who holds the devices. Every method may be called at any time and does what is left to do.

    Args:
        keep_weights: the engines keep them while the trainer works, because the next publish does not bring all of them
        others: engines of models that nobody publishes to; they keep a copy of their weights in host memory
    """

    def __init__(self, trainer: Trainer, engines: EngineGroup, *, keep_weights: bool, others: Sequence[EngineGroup] = ()) -> None:
        self._trainer = trainer
        self._engines = engines
        self._others = others
        self._keep_weights = keep_weights
        self._on_devices: set[MemoryTag] = {"weights", "kv_cache"}
        """Of the engines."""
        self._trainer_is_on = False

    async def to_trainer(self) -> None:
        await self._release("kv_cache")
        if not self._keep_weights:
            await self._release("weights")
        await self._load_trainer()

    async def to_both(self) -> None:
        """The trainer, and the engines' weights."""
        await self._release("kv_cache")
        await self._resume("weights")
        await self._load_trainer()

    async def to_engines(self) -> None:
        assert "weights" in self._on_devices, "a publish came before: the engines would sample from memory that holds anything"
        if self._trainer_is_on:
            self._trainer_is_on = False
            await self._trainer.offload()
        if "kv_cache" not in self._on_devices:
            await self._resume("kv_cache")
            for group in self._others:
                await group.resume_memory()
            for group in (self._engines, *self._others):
                await group.resume()

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """The trainer is loaded for the block; who had the devices has them afterwards."""
        was_on = self._trainer_is_on
        if not was_on:
            await self.to_both()
        yield
        if not was_on:
            await self.to_engines()

    async def _load_trainer(self) -> None:
        if not self._trainer_is_on:
            await self._trainer.onload()
            self._trainer_is_on = True

    async def _release(self, tag: MemoryTag) -> None:
        if tag not in self._on_devices:
            return
        if tag == "kv_cache":
            for group in (self._engines, *self._others):
                await group.pause("abort")  # an engine with requests gives nothing back
            for group in self._others:
                await group.release_memory()
        self._on_devices.discard(tag)
        await self._engines.release_memory(tag)

    async def _resume(self, tag: MemoryTag) -> None:
        if tag not in self._on_devices:
            await self._engines.resume_memory(tag)
            self._on_devices.add(tag)


class SharingTrainer:
    """Takes its turn before it works. Implements `trainer.protocol.Trainer`; the trainer is loaded already, and offloaded."""

    def __init__(self, trainer: Trainer, turns: Turns) -> None:
        self._trainer = trainer
        self._turns = turns

    @property
    def num_updates(self) -> int:
        return self._trainer.num_updates

    async def load(self) -> None:
        raise AssertionError("it was loaded before the engines started")

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        await self._turns.to_trainer()
        return await self._trainer.score(samples)

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        async with self._turns.borrowed():
            return await self._trainer.logprobs(samples)

    async def train(self, batch: TrainBatch) -> StepResult:
        await self._turns.to_trainer()
        return await self._trainer.train(batch)

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        await self._turns.to_both()
        return await self._trainer.send_weights(target)

    async def save(self, directory: Path) -> None:
        async with self._turns.borrowed():
            await self._trainer.save(directory)

    async def begin_save(self, directory: Path) -> None:
        async with self._turns.borrowed():
            await self._trainer.begin_save(directory)

    async def end_save(self) -> None:
        await self._trainer.end_save()

    async def restore(self, directory: Path) -> None:
        async with self._turns.borrowed():
            await self._trainer.restore(directory)

    async def offload(self) -> None:
        await self._turns.to_engines()

    async def onload(self) -> None:
        await self._turns.to_trainer()

    async def close(self) -> None:
        await self._trainer.close()


@dataclass(slots=True, frozen=True)
class SharingPublisher:
    """After a publish it is the engines' turn."""

    publisher: WeightPublisher
    turns: Turns

    @property
    def version(self) -> int:
        return self.publisher.version

    async def publish(self) -> int:
        version = await self.publisher.publish()
        await self.turns.to_engines()
        return version

    async def sync(self) -> None:
        await self.publisher.sync()
        await self.turns.to_engines()


@dataclass(slots=True, frozen=True)
class SharingProof:
    """Engines sample for a proof: it is their turn, and the trainer borrows the devices to score."""

    proof: EqualityProof
    turns: Turns

    async def check(self, engines: EngineGroup, manifest: WeightManifest) -> None:
        await self.turns.to_engines()
        await self.proof.check(engines, manifest)
