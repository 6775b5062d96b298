"""Trainer and engines on the same devices (--colocate): each gives its memory back while the other works.

The loop knows nothing of it: a trainer and a publisher that take turns stand where the real ones would.

    sampling              engines hold weights and KV cache, the trainer is offloaded
    score, train          the trainer is loaded, the engines hold nothing
    publish               the trainer is loaded, the engines hold weights to be overwritten
    save, logprobs        as in publish: the engines keep their weights

An engine that died (--use-fault-tolerance) is started while the trainer is off, and the trainer is loaded when it is up. It gets weights
with the next publish; where no other serves, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fuligo.engines.client import EngineClient, MemoryTag
from fuligo.engines.group import WAIT_S, EngineGroup
from fuligo.trainer.protocol import Trainer
from fuligo.types import FloatArray, StepResult, TrainBatch, TrainSample
from fuligo.weights.manifest import WeightManifest, WeightTarget
from fuligo.weights.publisher import WeightPublisher


class Turns:
    """Who holds the devices. Every method may be called at any time and does what is left to do. Implements the `SharedDevices` of
    `weights.publisher` and of `engines.sglang.fleet`.

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
        self._engines_may_start = asyncio.Event()
        self._engines_may_start.set()
        self.work = asyncio.Lock()
        """Held by a piece of the trainer's work, and by a publish: a restarted engine gets its weights in between."""

    @property
    def engines_sample(self) -> bool:
        return not self._trainer_is_on and "kv_cache" in self._on_devices

    async def to_trainer(self) -> None:
        await self._hold_starts()
        await self._release("kv_cache")
        if not self._keep_weights:
            await self._release("weights")
        await self._load_trainer()

    async def to_both(self) -> None:
        """The trainer, and the engines' weights."""
        await self._hold_starts()
        await self._release("kv_cache")
        await self._resume("weights")
        await self._load_trainer()

    async def to_engines(self) -> None:
        assert "weights" in self._on_devices, "a publish came before: the engines would sample from memory that holds anything"
        await self._unload_trainer()
        if "kv_cache" not in self._on_devices:
            await self._resume("kv_cache")
            for group in self._others:
                await group.tell(lambda everyone: everyone.resume_memory())
            for group in (self._engines, *self._others):
                await group.tell(lambda everyone: everyone.resume())
        self._engines_may_start.set()

    async def make_room(self) -> None:
        """For engines to start in the trainer's turn; returns when those that are starting are up."""
        await self._unload_trainer()
        self._engines_may_start.set()
        await self._settled()

    async def wait_for_room(self) -> None:
        """Return when an engine may start."""
        while not self._engines_may_start.is_set():  # whose turn it is may change before a waiter is heard
            await self._engines_may_start.wait()

    async def align(self, client: EngineClient, group: EngineGroup) -> None:
        """Take from a restarted engine what the others of its group do not hold."""
        if "kv_cache" in self._on_devices:
            return
        await client.pause("abort")
        if group is not self._engines:
            await client.release_memory()
            return
        await client.release_memory("kv_cache")
        if "weights" not in self._on_devices:
            await client.release_memory("weights")

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """The trainer is loaded for the block; who had the devices has them afterwards. (An error of the block ends the run.)"""
        was_on = self._trainer_is_on
        if not was_on:
            await self.to_both()
        yield
        if not was_on:
            await self.to_engines()

    async def _hold_starts(self) -> None:
        """Until it is the engines' turn again none starts; those that are starting are waited for, to be told what all are told."""
        self._engines_may_start.clear()
        await self._settled()

    async def _settled(self) -> None:
        while not all(group.is_settled for group in (self._engines, *self._others)):  # noqa: ASYNC110  # nothing tells but asking
            await asyncio.sleep(WAIT_S)

    async def _load_trainer(self) -> None:
        if not self._trainer_is_on:
            await self._settled()  # what is left of an engine that died just now holds memory, too
            await self._trainer.onload()
            self._trainer_is_on = True

    async def _unload_trainer(self) -> None:
        if self._trainer_is_on:
            self._trainer_is_on = False
            await self._trainer.offload()

    async def _release(self, tag: MemoryTag) -> None:
        if tag not in self._on_devices:
            return
        if tag == "kv_cache":
            for group in (self._engines, *self._others):
                await group.tell(lambda everyone: everyone.pause("abort"))  # an engine with requests gives nothing back
            for group in self._others:
                await group.tell(lambda everyone: everyone.release_memory())
        self._on_devices.discard(tag)
        await self._engines.tell(lambda everyone: everyone.release_memory(tag))

    async def _resume(self, tag: MemoryTag) -> None:
        if tag not in self._on_devices:
            await self._engines.tell(lambda everyone: everyone.resume_memory(tag))
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
        async with self._turns.work:
            await self._turns.to_trainer()
            return await self._trainer.score(samples)

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        async with self._turns.borrowed():
            return await self._trainer.logprobs(samples)

    async def train(self, batch: TrainBatch) -> StepResult:
        async with self._turns.work:
            await self._turns.to_trainer()
            return await self._trainer.train(batch)

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        await self._turns.to_both()
        return await self._trainer.send_weights(target)

    async def save(self, directory: Path) -> None:
        async with self._turns.work, self._turns.borrowed():
            await self._trainer.save(directory)

    async def begin_save(self, directory: Path) -> None:
        async with self._turns.work, self._turns.borrowed():
            await self._trainer.begin_save(directory)

    async def end_save(self) -> None:
        await self._trainer.end_save()

    async def restore(self, directory: Path) -> None:
        async with self._turns.work, self._turns.borrowed():
            await self._trainer.restore(directory)

    async def offload(self) -> None:
        await self._turns.to_engines()

    async def onload(self) -> None:
        await self._turns.to_trainer()

    async def close(self) -> None:
        await self._trainer.close()


@dataclass(slots=True, frozen=True)
class SharingPublisher:
    """A publish is one piece of work; afterwards it is the engines' turn."""

    publisher: WeightPublisher
    engines: EngineGroup
    turns: Turns

    @property
    def version(self) -> int:
        return self.publisher.version

    async def publish(self) -> int:
        async with self.turns.work:
            return await self.publisher.publish()

    async def sync(self) -> None:
        async with self.turns.work:
            await self.publisher.sync()

    async def renew(self, engine: EngineClient) -> bool:
        """As `WeightPublisher.renew`, where no engine serves: it would have to end the requests of those that do.

        Once begun it goes on to its end, also where the caller is cancelled because the engine died again.
        """
        renewing = asyncio.create_task(self._renew(engine))
        try:
            return await asyncio.shield(renewing)
        except asyncio.CancelledError:
            renewing.add_done_callback(lambda done: done.cancelled() or done.exception())  # who cancelled knows why it failed
            raise

    async def _renew(self, engine: EngineClient) -> bool:
        async with self.turns.work:
            if self.engines.clients or not self.turns.engines_sample:
                return engine in self.engines.clients
            try:
                await self.turns.to_both()  # others that are starting are up then, and come along
                return await self.publisher.renew(engine)
            finally:
                await self.turns.to_engines()
