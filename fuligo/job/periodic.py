"""Periodic tasks after rollouts: evaluation, checkpoints, debug data."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuligo.checkpoint.state import DriverRng, RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.convert.export import export, push
from fuligo.job.recorder import RunRecorder
from fuligo.rollout.debug_data import save_rollout
from fuligo.rollout.evaluate import Evaluates, Evaluation
from fuligo.rollout.protocol import Rollout
from fuligo.trainer.protocol import Trainer


@dataclass(slots=True, frozen=True)
class Schedule:
    """Schedule of a task: every `interval` rollouts, and after the last one."""

    interval: int | None
    num_rollout: int
    includes_last: bool = True
    """False: the last rollout is like any other."""

    def due(self, step: int) -> bool:
        done = step + 1
        return (self.includes_last and done == self.num_rollout) or (self.interval is not None and done % self.interval == 0)


@dataclass(slots=True)
class Evaluate:
    """Evaluation with the current weights of the engines."""

    evaluator: Evaluates
    schedule: Schedule
    recorder: RunRecorder
    history: list[Evaluation] = field(default_factory=list)

    def due(self, step: int) -> bool:
        return self.schedule.due(step)

    async def run(self, rollout: Rollout, version: int) -> None:
        await self.evaluate(num_rollouts=rollout.step + 1)

    async def evaluate(self, num_rollouts: int) -> None:
        """Evaluate and record the result. `num_rollouts`: complete rollouts; 0 is the untrained policy."""
        with self.recorder.phase("eval", num_rollouts):
            evaluation = await self.evaluator.evaluate(num_rollouts)
        self.history.append(evaluation)
        self.recorder.record_evaluation(num_rollouts, evaluation)

    async def finish(self) -> None:
        """Do nothing: an evaluation is complete when `run` returns."""


@dataclass(slots=True)
class SaveCheckpoint:
    """Checkpoints with everything that an exact resume needs: weights, optimizer, random state, data order, buffer, version."""

    store: CheckpointStore
    trainer: Trainer
    schedule: Schedule
    recorder: RunRecorder
    config_text: str
    export_to: str | None
    """Path of an additional Hugging Face directory, in which `{rollout_id}` is replaced; None: no export."""
    push_to: str | None = None
    """Repository on the Hub to upload every export to; None: no upload."""
    in_background: bool = False
    """--async-save: training continues while a copy is written; the next save or the end of the run waits for it."""
    keeps_last: bool = False
    """True to keep the state after every rollout until the next one is trained on, so that a run that ends early can save it."""
    _last: RunState | None = None
    """State after the last rollout, unless it is saved."""
    _writing: asyncio.Task[Path] | None = None
    _saving: asyncio.Task[None] | None = None
    """Task that waits for `_writing` and then exports the checkpoint."""

    def due(self, step: int) -> bool:
        return self.keeps_last or self.schedule.due(step) or (self._saving is not None and self._saving.done())

    async def run(self, rollout: Rollout, version: int) -> None:
        """Save a checkpoint if one is due.

        Raises FuligoError if this checkpoint, or the one before it, could not be written or exported.
        """
        due = self.schedule.due(rollout.step)
        if self._saving is not None and (due or self._saving.done()):
            await self.finish()
        done = rollout.step + 1
        if not due:
            self._last = RunState(done, version, rollout.state.copy(), self.config_text, DriverRng.capture()) if self.keeps_last else None
            return
        self._last = None
        with self.recorder.phase("save", done):
            state = RunState(done, version, rollout.state, self.config_text, DriverRng.capture())
            if self.in_background:
                self._writing = await self.store.begin(done, self.trainer.begin_save, self.trainer.end_save, state)
                self._saving = asyncio.create_task(self._export_when_written(self._writing, rollout.step))
            else:
                await self._export(await self.store.save(done, self.trainer.save, state), rollout.step)

    @property
    def has_unsaved(self) -> bool:
        """True if `save_last` has anything to save, or to finish saving."""
        return self._last is not None or self._saving is not None

    async def save_last(self) -> None:
        """Save the state after the last rollout, unless it is saved already. Call it before another rollout is trained on.

        Raises FuligoError if this checkpoint could not be written, or the one before it could not be written or exported.
        """
        await self.finish()
        if self._last is not None:
            with self.recorder.phase("save", self._last.step):
                await self.store.save(self._last.step, self.trainer.save, self._last)
            self._last = None

    async def finish(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def abandon(self) -> None:
        """Cancel the write when the run ends early; no incomplete checkpoint becomes visible."""
        tasks: list[asyncio.Task[Any]] = [task for task in (self._writing, self._saving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _export_when_written(self, writing: asyncio.Task[Path], step: int) -> None:
        await self._export(await writing, step)

    async def _export(self, checkpoint: Path, step: int) -> None:
        if self.export_to is None:
            return
        target = Path(self.export_to.replace("{rollout_id}", str(step)))
        await asyncio.to_thread(export, checkpoint, target)
        if self.push_to is not None:
            await asyncio.to_thread(push, target, self.push_to, title=f"After rollout {step}")


@dataclass(slots=True)
class SaveDebugRollout:
    """Copies of the rollouts, to train on them again without an engine (--save-debug-rollout-data)."""

    template: str

    def due(self, step: int) -> bool:
        return True

    async def run(self, rollout: Rollout, version: int) -> None:
        save_rollout(self.template, rollout)

    async def finish(self) -> None:
        """Do nothing: a rollout is written when `run` returns."""
