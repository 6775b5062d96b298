"""One run from its configuration to its end. Reads from top to bottom: where it starts, what it is made of, what it does."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fuligo.checkpoint.location import (
    Checkpoint,
    WeightsOnly,
    newest_iteration,
    nothing_left,
    resolve,
    value_weights_directory,
    weights_directory,
)
from fuligo.checkpoint.state import RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.config import Config
from fuligo.config.launcher import chosen_launcher
from fuligo.errors import CheckpointError
from fuligo.job.colocated import ColocatedDevices, ColocatedTrainer, ColocatedWeightSync
from fuligo.job.engines import Engines, build_weight_sync, launch_engines, share_devices
from fuligo.job.fleet import shares_devices
from fuligo.job.join import join_cluster
from fuligo.job.periodic import Evaluate, SaveCheckpoint, SaveDebugRollout, Schedule
from fuligo.job.recorder import RunRecorder
from fuligo.job.stream import Stream, StreamBuilder
from fuligo.job.teacher import find_teacher
from fuligo.job.trainer_settings import resolve_device, trainer_settings
from fuligo.job.watch import failing_with, while_watching
from fuligo.loop import Loop, Periodic, WeightSyncing, sample_only
from fuligo.observability.progress import open_progress
from fuligo.observability.run_directory import CHECKPOINTS, RunDirectory
from fuligo.observability.sinks import open_sinks
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.modes import PacedRollouts
from fuligo.trainer.before_train import BeforeTrainStep
from fuligo.trainer.settings import advantage_settings, bound_hook, sample_settings
from fuligo.weights.sync import VersionCounter, WeightSync

if TYPE_CHECKING:
    from fuligo.cluster.cluster import RayCluster
    from fuligo.trainer.protocol import Trainer

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Outcome:
    """What a run gave."""

    run_dir: Path
    evaluations: list[Evaluation]
    """In order; the first is of the untrained policy unless that was skipped."""


@dataclass(slots=True, frozen=True)
class Origin:
    """Where a run starts or goes on."""

    step: int
    policy_version: int
    initial_weights: Path
    """Hugging Face directory or distributed checkpoint."""
    checkpoint: Path | None
    """Directory of the checkpoint that is resumed."""
    state: RunState | None

    @classmethod
    def find(cls, config: Config) -> Origin:
        """
        Raises:
            CheckpointError: `--load` holds something that cannot be resumed, or `--ref-load` damaged checkpoints.
        """
        load = config.checkpoint.load
        found = resolve(Path(load) if load is not None else None, config.checkpoint.ckpt_step)
        assert config.initial_weights_path is not None, "validated: there are first weights"
        first = weights_directory(Path(config.initial_weights_path))
        if isinstance(found, Checkpoint):
            state = found.state()
            return cls(state.step, state.policy_version, first, found.directory, state)
        weights = found.directory if isinstance(found, WeightsOnly) else first
        return cls(0, 0, weights, None, None)

    def may_cut_back(self, config: Config, run_dir: Path) -> bool:
        """Whether recorded steps may give way to this run's: they follow its checkpoint, or nothing was saved of them where it saves.

        A run that begins anew because of another `--load`, misspelt perhaps, must not replace a finished one.
        """
        load = config.checkpoint.load
        save = Path(config.checkpoint.save or run_dir / CHECKPOINTS)
        return load is not None and (self.checkpoint is not None or Path(load).resolve() == save.resolve())


async def run_config(config: Config) -> Outcome:
    """
    Raises:
        FuligoError: what went wrong, with the fix in its text. What was recorded and saved until then is on disk.
    """
    origin = Origin.find(config)
    async with AsyncExitStack() as stack:
        run_dir = config.run_directory(datetime.now())
        directory = RunDirectory.create(run_dir, config, resume=origin.may_cut_back(config, run_dir))
        stack.callback(directory.close)
        stack.push(partial(_told_interrupted, config, directory))
        directory.cut_back(origin.step)
        if origin.state is not None:
            logger.info("resuming from %s at rollout %d", origin.checkpoint, origin.step)
            origin.state.rng.restore()
        if chosen_launcher(config) == "local":
            return await _run(config, origin, directory, stack, None)
        config, cluster = await join_cluster(config, [origin.initial_weights, *_other_weights(config)], directory, stack)
        return await _run(config, origin, directory, stack, cluster)


def _told_interrupted(config: Config, directory: RunDirectory, kind: type[BaseException] | None, *_: object) -> None:
    """After Ctrl-C or SIGTERM: where the run is, and how it goes on."""
    if kind is None or not issubclass(kind, asyncio.CancelledError):
        return
    save = Path(config.checkpoint.save or directory.path / CHECKPOINTS)
    iteration = newest_iteration(save)
    print(f"interrupted; run directory: {directory.path}", file=sys.stderr)
    if iteration is None:
        print("it has no checkpoint yet (--save-interval)", file=sys.stderr)
    else:
        command = f"fuligo train --config {directory.config_file} --run-dir {directory.path} --load {save}"
        print(f"to go on after {iteration} rollouts: {command}", file=sys.stderr)


def _other_weights(config: Config) -> list[Path]:
    """What the trainer loads beside the policy's: a teacher's, and what a value model begins with."""
    teacher, critic = config.algorithm.opd_teacher_load, config.checkpoint.critic_load
    of_values = [value_weights_directory(Path(critic))] if critic is not None and config.trains_values else []
    return of_values if teacher is None else [Path(teacher), *of_values]


async def _run(config: Config, origin: Origin, directory: RunDirectory, stack: AsyncExitStack, cluster: RayCluster | None) -> Outcome:
    trainer_is_off = asyncio.Event()  # engines size their memory by what is free when they start
    if not shares_devices(config):
        trainer_is_off.set()
    launching = asyncio.create_task(_launch_after(trainer_is_off, config, directory, stack, cluster))
    stack.push_async_callback(_abandon, launching)
    await asyncio.sleep(0)  # the engine's process starts now, beside all that follows
    state = None if origin.state is None else origin.state.rollout
    builder = StreamBuilder.open(config, state)
    num_rollout = builder.num_rollout
    if problem := nothing_left(origin.checkpoint, origin.step, num_rollout):
        raise CheckpointError(problem)
    recorder = _open_recorder(config, directory, origin, num_rollout, stack)

    with recorder.phase("start", origin.step):
        async with failing_with(launching):  # an engine that does not start is known long before a large model is loaded
            trainer = await _load_trainer(config, origin, num_rollout, stack, directory, cluster)
        if trainer is not None and not trainer_is_off.is_set():
            await trainer.offload()
        trainer_is_off.set()
        engines = await launching
        teacher = None if engines is None else await find_teacher(config, engines, stack)
    devices = _devices(config, trainer, engines)
    if trainer is not None and devices is not None:
        trainer = ColocatedTrainer(trainer, devices)
    weights = _weight_sync(config, trainer, engines, devices, version=origin.policy_version, cluster=cluster)
    if engines is not None:
        await stack.enter_async_context(engines.watched(weights, devices))
        if trainer is not None:
            with recorder.phase("sync", origin.step):
                await weights.resync()
        config = config.served_at(engines.urls)
        builder = replace(builder, config=config)
    stream = builder.build(
        None if engines is None else engines.group,
        state=state,
        policy_version=lambda: weights.version,
        stack=stack,
        teacher=teacher,
    )
    if engines is not None:
        stream = replace(stream, produce=engines.measured(stream.produce))
    rollouts = stream.rollouts(config, start=origin.step, num_rollout=num_rollout, phase=recorder.phase)
    stack.push_async_callback(rollouts.close)

    evaluate = _evaluate(config, directory, stream, num_rollout, recorder)
    periodic = _periodic(config, directory, num_rollout, trainer, recorder, evaluate)
    for task in periodic:
        if isinstance(task, SaveCheckpoint):
            stack.push_async_callback(task.abandon)
    if evaluate is not None and origin.step == 0 and not config.eval.skip_eval_before_train:
        await evaluate.evaluate(num_rollouts=0)
    gc.freeze()  # what was made so far lives as long as the run: full collections, a tenth of a second each, need not look at it
    recorder.start(origin.step)
    if trainer is None:
        await sample_only(rollouts, recorder, periodic)
    else:
        await _loop(config, rollouts, trainer, weights, recorder, periodic).run()
    return Outcome(directory.path, evaluate.history if evaluate is not None else [])


async def _launch_after(
    event: asyncio.Event, config: Config, directory: RunDirectory, stack: AsyncExitStack, cluster: RayCluster | None
) -> Engines | None:
    await event.wait()
    return await launch_engines(config, directory, stack, cluster)


async def _abandon(task: asyncio.Task[Engines | None]) -> None:
    """An engine that is still starting when the run fails is stopped."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _load_trainer(
    config: Config, origin: Origin, num_rollout: int, stack: AsyncExitStack, directory: RunDirectory, cluster: RayCluster | None
) -> Trainer | None:
    """None with --debug-rollout-only."""
    if config.debug.debug_rollout_only:
        return None
    settings = trainer_settings(config, resolve_device(config), initial_weights=origin.initial_weights, num_rollout=num_rollout)
    if cluster is None:
        from fuligo.trainer.ranks.trainer import LocalTrainer

        trainer = LocalTrainer(settings)
    else:
        trainer = cluster.trainer(settings, directory.path)
    stack.push_async_callback(trainer.close)
    await stack.enter_async_context(while_watching(trainer.watch()))
    await trainer.load()
    if origin.checkpoint is not None:
        await trainer.restore(origin.checkpoint)
    return trainer


def _devices(config: Config, trainer: Trainer | None, engines: Engines | None) -> ColocatedDevices | None:
    """None where trainer and engines have devices of their own, or one of them is not there."""
    if trainer is None or engines is None or not shares_devices(config):
        return None
    return share_devices(config, trainer, engines)


def _weight_sync(
    config: Config,
    trainer: Trainer | None,
    engines: Engines | None,
    devices: ColocatedDevices | None,
    *,
    version: int,
    cluster: RayCluster | None,
) -> WeightSync | ColocatedWeightSync | VersionCounter:
    if trainer is None or engines is None:
        return VersionCounter(version)
    return build_weight_sync(config, trainer, engines.group, version=version, cluster=cluster, devices=devices)


def _open_recorder(config: Config, directory: RunDirectory, origin: Origin, num_rollout: int, stack: AsyncExitStack) -> RunRecorder:
    flags = config.observability
    progress = open_progress(flags.progress, str(directory.path), num_rollout, start=origin.step)
    directory.trace.on_phase = progress.phase
    sinks = open_sinks(config, directory.path, start=origin.step)
    for sink in sinks:
        stack.callback(sink.close)
    stack.enter_context(progress)
    return RunRecorder(directory, progress, sinks, save_samples=flags.save_samples, reward_key=config.reward.reward_key)


def _evaluate(config: Config, directory: RunDirectory, stream: Stream, num_rollout: int, recorder: RunRecorder) -> Evaluate | None:
    if stream.evaluator is None:
        return None
    schedule = Schedule(config.eval.eval_interval, num_rollout)
    return Evaluate(stream.evaluator, schedule, directory, recorder, config.resolved_eval_reward_key)


def _periodic(
    config: Config, directory: RunDirectory, num_rollout: int, trainer: Trainer | None, recorder: RunRecorder, evaluate: Evaluate | None
) -> list[Periodic]:
    """In the order in which they happen: when a checkpoint appears, everything about its last step is on disk."""
    periodic: list[Periodic] = []
    if config.debug.save_debug_rollout_data is not None:
        periodic.append(SaveDebugRollout(config.debug.save_debug_rollout_data))
    if evaluate is not None:
        periodic.append(evaluate)
    if trainer is not None:
        flags = config.checkpoint
        store = CheckpointStore(Path(flags.save) if flags.save is not None else directory.checkpoints, keep=flags.keep_checkpoints)
        schedule = Schedule(flags.save_interval, num_rollout)
        text = directory.config_file.read_text()
        periodic.append(SaveCheckpoint(store, trainer, schedule, recorder, text, flags.save_hf, in_background=flags.async_save))
    return periodic


def _loop(
    config: Config, rollouts: PacedRollouts, trainer: Trainer, weights: WeightSyncing, recorder: RunRecorder, periodic: list[Periodic]
) -> Loop:
    before = bound_hook(config, "before_train_step_path")
    return Loop(
        rollouts=rollouts,
        trainer=trainer,
        weights=weights,
        recorder=recorder,
        periodic=periodic,
        sample_settings=sample_settings(config),
        advantage_settings=advantage_settings(config),
        update_interval=config.weight_sync.update_weights_interval,
        before_train_step=None if before is None else BeforeTrainStep(before, config.resolved_data_parallel_size),
    )
