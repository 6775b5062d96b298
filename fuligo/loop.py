"""Training loop: prompts -> rollout -> samples -> advantages -> packed batch -> loss -> weights -> engines.

It depends on protocols only; `job/` chooses backends, devices and processes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.rollout.producer import PacedRollouts
from fuligo.rollout.protocol import Rollout
from fuligo.trainer.exactness import require_exact
from fuligo.trainer.protocol import Trainer
from fuligo.trainer.samples import SampleSettings, train_samples
from fuligo.types import StepResult, TrainBatch, TrainSample


class WeightSyncing(Protocol):
    """Sync of the engines to the trainer's weights; see `weights.sync.WeightSync`."""

    @property
    def version(self) -> int:
        """Version of the weights in the engines."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last sync."""
        ...

    async def sync(self) -> int:
        """Sync the weights and return their version."""
        ...


class Recorder(Protocol):
    """Record of a run: metrics, samples, trace, console; see `job.recorder.RunRecorder`."""

    def phase(self, name: str, step: int) -> AbstractContextManager[object]: ...

    def record(self, rollout: Rollout, batch: TrainBatch | None, result: StepResult | None, version: int) -> None: ...


class Periodic(Protocol):
    """Task that runs after certain rollouts (evaluation, checkpoint); see `job.periodic`."""

    def due(self, step: int) -> bool:
        """Return whether the task runs after rollout `step`."""
        ...

    async def run(self, rollout: Rollout, version: int) -> None: ...

    async def finish(self) -> None:
        """Wait for background work after the last rollout."""


@dataclass(slots=True)
class Loop:
    """Training loop of a run, with the parts that it drives."""

    rollouts: PacedRollouts
    trainer: Trainer
    weights: WeightSyncing
    recorder: Recorder
    periodic: list[Periodic]
    sample_settings: SampleSettings
    advantage_settings: AdvantageSettings
    update_interval: int = 1
    """Rollouts between weight syncs."""
    requires_exact: bool = False
    """True to fail if the trainer's log-probabilities differ from the engine's (--exact-on-policy)."""
    post_process: Callable[[list[TrainSample]], None] | None = None
    """Hook that receives the scored samples, and may change them, before advantages are computed; None: no hook."""
    before_train_step: Callable[[int, TrainBatch], None] | None = None
    """Hook that receives the rollout id and the batch, and may change the batch, before training on it; None: no hook."""
    is_training: bool = False
    """True from the start of a training step until it is recorded and its periodic tasks are done: the trainer's weights belong to no
    complete rollout. If a step fails, it stays True."""

    async def run(self) -> None:
        async for rollout in self.rollouts:
            await self.step(rollout)
        await finish(self.periodic)

    async def step(self, rollout: Rollout) -> None:
        """Train on one rollout, sync the new weights to the engines, record the step, and run the periodic tasks that are due."""
        step, phase = rollout.step, self.recorder.phase
        with phase("score", step):
            samples = await self.trainer.score(train_samples(rollout.kept, self.sample_settings))
            if self.post_process is not None:
                self.post_process(samples)
            batch = assign_advantages(samples, self.advantage_settings)
            if self.before_train_step is not None:
                self.before_train_step(step, batch)
        self.is_training = True
        with phase("train", step):
            result = await self.trainer.train(batch)
        if self.requires_exact:
            require_exact(batch, result, self.weights.version)
        with phase("sync", step):
            version = await self.sync_weights(step)
        result.metrics.update(self.weights.metrics)
        self.recorder.record(rollout, batch, result, version)
        await run_due(self.periodic, rollout, version)
        self.is_training = False

    async def sync_weights(self, step: int) -> int:
        """Sync the engines after every `update_interval` rollouts; return the version of the weights in the engines."""
        if (step + 1) % self.update_interval != 0:
            return self.weights.version
        await self.rollouts.settle()
        return await self.weights.sync()


async def sample_only(rollouts: PacedRollouts, recorder: Recorder, periodic: list[Periodic]) -> None:
    """Sample and reward rollouts without training (--debug-rollout-only)."""
    async for rollout in rollouts:
        recorder.record(rollout, None, None, 0)
        await run_due(periodic, rollout, 0)
    await finish(periodic)


async def run_due(periodic: list[Periodic], rollout: Rollout, version: int) -> None:
    """Run the tasks that are due after this rollout, in order."""
    for task in periodic:
        if task.due(rollout.step):
            await task.run(rollout, version)


async def finish(periodic: list[Periodic]) -> None:
    for task in periodic:
        await task.finish()
