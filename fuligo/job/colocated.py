"""Trainer and engines on the same devices (--colocate): each releases its memory while the other works.

The loop is not aware of this: it gets a trainer and a weight sync that take the devices before they work.

    phase             trainer                  engines
    sampling          offloaded                weights and KV cache
    score, train      loaded                   nothing
    weight sync       loaded                   weights, to be overwritten
    save, logprobs    loaded                   weights, which they keep

With --no-offload-train, an offloaded trainer still holds its weights and optimizer state on the devices.
With --update-weight-mode delta, the engines keep their weights in every phase.

An engine that died (--use-fault-tolerance) restarts while the trainer is offloaded; the trainer is loaded again when the engine is up.
The engine receives weights at the next sync, or at once if no other engine serves.

A lost trainer (--max-restarts) is replaced by another, which loads as in the phase "score, train".
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuligo.engines.engine import InferenceEngine, MemoryTag
from fuligo.engines.group import WAIT_S, EngineGroup
from fuligo.formats.weight_manifest import WeightManifest, WeightTarget
from fuligo.trainer.protocol import Trainer
from fuligo.types import FloatArray, StepResult, TrainBatch, TrainSample
from fuligo.weights.sync import WeightSync


class ColocatedDevices:
    """State of the shared devices. Implements `engines.backend.SharedDevices`.

    Every method does only what is left to do in the current state. A trainer must be attached before it takes its turn, and weights
    that the engines released must be synced before the engines take theirs.

    Args:
        keep_weights: engines keep their weights while the trainer works, because the next sync sends only those that changed
        others: engines of models that are not synced; they keep a copy of their weights in host memory
    """

    def __init__(self, engines: EngineGroup, *, keep_weights: bool, others: Sequence[EngineGroup] = ()) -> None:
        self._trainer: Trainer | None = None
        self._engines = engines
        self._groups = (engines, *others)
        self._others = others
        self._keep_weights = keep_weights
        self._held: set[MemoryTag] = {"weights", "kv_cache"}
        """Memory that the engines hold."""
        self._trainer_is_loaded = False
        self._engines_may_start = asyncio.Event()
        self._engines_may_start.set()
        self.work = asyncio.Lock()
        """Lock held during each call of the trainer and each weight sync; a restarted engine gets its weights between them."""

    @property
    def engines_sample(self) -> bool:
        """True if the engines hold all memory that sampling needs."""
        return not self._trainer_is_loaded and "kv_cache" in self._held

    def attach(self, trainer: Trainer, *, is_loaded: bool) -> None:
        """Start sharing the devices with a trainer. `is_loaded`: the trainer holds its memory, as a replacement does after `detach`."""
        self._trainer, self._trainer_is_loaded = trainer, is_loaded

    async def detach(self) -> None:
        """Detach a trainer that has ended; the engines release the memory that the next trainer needs to load."""
        async with self.work:
            self._trainer, self._trainer_is_loaded = None, False
            await self._release_for_trainer()

    async def to_trainer(self) -> None:
        """Have the engines release their KV cache and, unless `keep_weights`, their weights; then load the trainer."""
        await self._release_for_trainer()
        await self._load_trainer()

    async def to_both(self) -> None:
        """Load the trainer while the engines hold memory for their weights, which is uninitialized if they had released it."""
        await self._hold_starts()
        await self._release("kv_cache")
        await _to_its_end(self._resume("weights"))
        await self._load_trainer()

    async def to_engines(self) -> None:
        """Offload the trainer; the engines sample."""
        assert "weights" in self._held, "cannot sample before a weight sync: the memory of the weights is uninitialized"
        await self._offload_trainer()
        if "kv_cache" not in self._held:
            await _to_its_end(self._resume_sampling())
        self._engines_may_start.set()

    async def make_room(self) -> None:
        """Offload the trainer so that engines can start during its turn, and wait until the starting ones are up."""
        await self._offload_trainer()
        self._engines_may_start.set()
        await self._wait_settled()

    async def wait_for_room(self) -> None:
        """Wait until an engine may start."""
        while not self._engines_may_start.is_set():  # the event may be cleared again before this waiter runs
            await self._engines_may_start.wait()

    async def align(self, client: InferenceEngine, group: EngineGroup) -> None:
        """Release the memory of a restarted engine that the other engines of its group have released."""
        if "kv_cache" in self._held:
            return
        await client.pause("abort")
        if group is not self._engines:
            await client.release_memory()
            return
        await client.release_memory("kv_cache")
        if "weights" not in self._held:
            await client.release_memory("weights")

    @asynccontextmanager
    async def trainer_loaded(self) -> AsyncIterator[None]:
        """Load the trainer for the block, then restore the previous state, except after an error, which ends the run."""
        was_loaded = self._trainer_is_loaded
        if not was_loaded:
            await self.to_both()
        yield
        if not was_loaded:
            await self.to_engines()

    async def _release_for_trainer(self) -> None:
        await self._hold_starts()
        await self._release("kv_cache")
        if not self._keep_weights:
            await self._release("weights")

    async def _resume_sampling(self) -> None:
        await self._resume("kv_cache")
        for group in self._others:
            await group.control(lambda everyone: everyone.resume_memory())
        for group in self._groups:
            await group.control(lambda everyone: everyone.resume())

    async def _hold_starts(self) -> None:
        """Keep engines from starting until the engines' next turn. Wait for those that are starting, so that they get the same commands."""
        self._engines_may_start.clear()
        await self._wait_settled()

    async def _wait_settled(self) -> None:
        while not all(group.is_settled for group in self._groups):  # noqa: ASYNC110  # a group has no event to wait for
            await asyncio.sleep(WAIT_S)

    async def _load_trainer(self) -> None:
        assert self._trainer is not None, "attach it first"
        if not self._trainer_is_loaded:
            await self._wait_settled()  # an engine that has just died still holds memory until its processes are gone
            await self._trainer.onload()
            self._trainer_is_loaded = True

    async def _offload_trainer(self) -> None:
        if self._trainer_is_loaded:
            assert self._trainer is not None, "it is loaded"
            self._trainer_is_loaded = False
            await self._trainer.offload()

    async def _release(self, tag: MemoryTag) -> None:
        if tag in self._held:
            await _to_its_end(self._release_now(tag))

    async def _release_now(self, tag: MemoryTag) -> None:
        if tag == "kv_cache":
            for group in self._groups:
                await group.control(lambda everyone: everyone.pause("abort"))  # an engine with requests in flight releases nothing
            for group in self._others:
                await group.control(lambda everyone: everyone.release_memory())
        self._held.discard(tag)
        await self._engines.control(lambda everyone: everyone.release_memory(tag))

    async def _resume(self, tag: MemoryTag) -> None:
        if tag not in self._held:
            await self._engines.control(lambda everyone: everyone.resume_memory(tag))
            self._held.add(tag)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await the work to its end even if canceled, so that the record of the engines' memory stays correct."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


@dataclass(slots=True, frozen=True)
class ColocatedTrainer:
    """Trainer that takes the devices before it works. Implements `trainer.protocol.Trainer`."""

    _trainer: Trainer
    """Trainer that has been loaded, and possibly offloaded since."""
    _devices: ColocatedDevices

    @property
    def num_updates(self) -> int:
        return self._trainer.num_updates

    async def load(self) -> None:
        raise AssertionError("the trainer was loaded before the engines started")

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        async with self._devices.work:
            await self._devices.to_trainer()
            return await self._trainer.score(samples)

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        async with self._devices.trainer_loaded():
            return await self._trainer.logprobs(samples)

    async def train(self, batch: TrainBatch) -> StepResult:
        async with self._devices.work:
            await self._devices.to_trainer()
            return await self._trainer.train(batch)

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        await self._devices.to_both()
        return await self._trainer.send_weights(target)

    async def save(self, directory: Path) -> None:
        async with self._devices.work, self._devices.trainer_loaded():
            await self._trainer.save(directory)

    async def begin_save(self, directory: Path) -> None:
        async with self._devices.work, self._devices.trainer_loaded():
            await self._trainer.begin_save(directory)

    async def end_save(self) -> None:
        await self._trainer.end_save()

    async def restore(self, directory: Path) -> None:
        async with self._devices.work, self._devices.trainer_loaded():
            await self._trainer.restore(directory)

    async def offload(self) -> None:
        await self._devices.to_engines()

    async def onload(self) -> None:
        await self._devices.to_trainer()

    async def close(self) -> None:
        await self._trainer.close()


@dataclass(slots=True, frozen=True)
class ColocatedWeightSync:
    """Weight sync that holds the lock of the shared devices during a sync."""

    weight_sync: WeightSync
    engines: EngineGroup
    devices: ColocatedDevices

    @property
    def version(self) -> int:
        return self.weight_sync.version

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.weight_sync.metrics

    async def sync(self) -> int:
        async with self.devices.work:
            return await self.weight_sync.sync()

    async def resync(self) -> None:
        async with self.devices.work:
            await self.weight_sync.resync()

    async def sync_restarted(self, engine: InferenceEngine) -> bool:
        """Send weights to a restarted engine if no other engine serves; return whether the engine has joined the serving engines.

        If others serve, the engine waits for the next sync, because a sync aborts the requests of all serving engines; it also waits
        during the trainer's turn. Once begun, the sync runs to its end even if the caller is canceled because the engine died again.
        """
        renewing = asyncio.create_task(self._sync_restarted(engine))
        try:
            return await asyncio.shield(renewing)
        except asyncio.CancelledError:
            renewing.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieves the error; the caller knows the cause
            raise

    async def _sync_restarted(self, engine: InferenceEngine) -> bool:
        async with self.devices.work:
            if self.engines.clients or not self.devices.engines_sample:
                return engine in self.engines.clients
            try:
                await self.devices.to_both()  # waits for other engines that are starting; they receive the weights too
                return await self.weight_sync.sync_restarted(engine)
            finally:
                await self.devices.to_engines()
