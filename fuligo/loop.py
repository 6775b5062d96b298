"""THE loop: prompts -> rollout -> samples -> advantages -> packed batch -> loss -> weights -> engines.

It knows protocols only: what runs where, on how many devices, under which backend is decided in `job/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.rollout.protocol import Rollout
from fuligo.trainer.protocol import Trainer
from fuligo.trainer.samples import SampleSettings, train_samples
from fuligo.types import StepResult, TrainBatch


class Rollouts(Protocol):
    """Rollouts in order, from the step where the run starts or resumes; see `rollout.modes.PacedRollouts`."""

    def __aiter__(self) -> AsyncIterator[Rollout]: ...

    async def settle(self) -> None:
        """Return when no sampling is under way, so that weights may change."""
        ...


class WeightSyncing(Protocol):
    """Brings the engines to the trainer's weights; see `weights.sync.WeightSync`."""

    @property
    def version(self) -> int: ...

    async def sync(self) -> int: ...


class Recorder(Protocol):
    """What a run leaves behind: metrics, samples, trace, console; see `job.recorder.RunRecorder`."""

    def phase(self, name: str, step: int) -> AbstractContextManager[object]: ...

    def record(self, rollout: Rollout, batch: TrainBatch | None, result: StepResult | None, version: int) -> None: ...


class Periodic(Protocol):
    """Something to do after some rollouts: evaluate, save a checkpoint; see `job.periodic`."""

    def due(self, step: int) -> bool: ...

    async def run(self, rollout: Rollout, version: int) -> None: ...

    async def finish(self) -> None:
        """After the last rollout: return when nothing of it is under way any more."""
        ...


@dataclass(slots=True)
class Loop:
    """The parts of a run, each behind a protocol."""

    rollouts: Rollouts
    trainer: Trainer
    weights: WeightSyncing
    recorder: Recorder
    periodic: list[Periodic]
    sample_settings: SampleSettings
    advantage_settings: AdvantageSettings
    update_interval: int = 1
    """Rollouts between weight syncs."""
    before_train_step: Callable[[int, TrainBatch], None] | None = None
    """Hook: sees (and may change) what a rollout's training is about to get."""

    async def run(self) -> None:
        async for rollout in self.rollouts:
            await self.step(rollout)
        await finish(self.periodic)

    async def step(self, rollout: Rollout) -> None:
        """One rollout's samples become new weights in the engines."""
        step, phase = rollout.step, self.recorder.phase
        with phase("score", step):
            samples = await self.trainer.score(train_samples(rollout.kept, self.sample_settings))
            batch = assign_advantages(samples, self.advantage_settings)
            if self.before_train_step is not None:
                self.before_train_step(step, batch)
        with phase("train", step):
            result = await self.trainer.train(batch)
        with phase("sync", step):
            version = await self.sync_weights(step)
        self.recorder.record(rollout, batch, result, version)
        await run_due(self.periodic, rollout, version)

    async def sync_weights(self, step: int) -> int:
        if (step + 1) % self.update_interval != 0:
            return self.weights.version
        await self.rollouts.settle()
        return await self.weights.sync()


async def sample_only(rollouts: Rollouts, recorder: Recorder, periodic: list[Periodic]) -> None:
    """Sample and judge, train nothing (--debug-rollout-only)."""
    async for rollout in rollouts:
        recorder.record(rollout, None, None, 0)
        await run_due(periodic, rollout, 0)
    await finish(periodic)


async def run_due(periodic: list[Periodic], rollout: Rollout, version: int) -> None:
    """What is due after this rollout, in order."""
    for task in periodic:
        if task.due(rollout.step):
            await task.run(rollout, version)


async def finish(periodic: list[Periodic]) -> None:
    for task in periodic:
        await task.finish()
