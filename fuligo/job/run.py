"""One run from its configuration to its end, in stages: open, start, wire, loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from fuligo.checkpoint.location import newest_iteration, nothing_left
from fuligo.checkpoint.store import CheckpointStore, saving_to
from fuligo.config import Config
from fuligo.errors import CheckpointError
from fuligo.job.colocated import ColocatedDevices, ColocatedTrainer, ColocatedWeightSync
from fuligo.job.engines import Engines, build_weight_sync, launch_engines, share_devices
from fuligo.job.join import Joined, join_cluster
from fuligo.job.origin import Origin, save_directory
from fuligo.job.periodic import Evaluate, SaveCheckpoint, SaveDebugRollout, Schedule
from fuligo.job.recorder import RunRecorder
from fuligo.job.rollouts import RolloutBuilder, RunData
from fuligo.job.stages import Opened, Started, Wired
from fuligo.job.teacher import find_teacher
from fuligo.job.termination import Termination
from fuligo.job.trainer_settings import trainer_settings
from fuligo.job.watch import failing_with, while_watching
from fuligo.loop import Loop, Periodic, sample_only
from fuligo.models.device import resolve_device
from fuligo.observability.progress import open_progress
from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.sinks import open_sinks
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.protocol import UnfilledRolloutError
from fuligo.trainer.protocol import Trainer
from fuligo.trainer.samples import BeforeTrainStep
from fuligo.trainer.settings import advantage_settings, bound_hook, sample_settings
from fuligo.weights.sync import VersionCounter, WeightSync

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Outcome:
    """Result of a run."""

    run_dir: Path
    evaluations: list[Evaluation]
    """Evaluations in order; the first is of the untrained policy unless that was skipped."""


async def run_config(config: Config, termination: Termination) -> Outcome:
    """Run a configuration to its end, or until its termination.

    Raises:
        FuligoError: the run failed; everything recorded and saved until then is on disk
    """
    async with AsyncExitStack() as stack:
        opened = await _open(config, stack)
        started = await _start(opened)
        wired = await _wire(started, termination)
        try:
            with termination.may_save():
                return await _loop(wired, termination)
        except UnfilledRolloutError as error:
            opened.recorder.record_unfilled(error)
            raise


async def _open(config: Config, stack: AsyncExitStack) -> Opened:
    """Open the run directory, the cluster and the data; begin to start the engines."""
    origin = Origin.find(config)
    run_dir = config.run_directory(datetime.now())
    directory = RunDirectory.create(run_dir, config, resume=origin.may_cut_back(config, run_dir))
    stack.callback(directory.close)
    stack.push(partial(_report_interruption, config, directory))
    if not config.debug.debug_rollout_only:
        stack.enter_context(saving_to(save_directory(config, run_dir)))
    directory.cut_back(origin.step)
    if origin.state is not None:
        logger.info("resuming from %s at rollout %d", origin.checkpoint, origin.step)
        origin.state.rng.restore()
    joined = await join_cluster(config, origin.weights_to_read(config), directory, stack)

    engines_may_start = asyncio.Event()
    if not joined.config.takes_turns:
        engines_may_start.set()
    launching = asyncio.create_task(_launch_engines(engines_may_start, joined, directory, stack))
    stack.push_async_callback(_cancel, launching)
    await asyncio.sleep(0)  # lets the task start the engine's process, which loads beside all that follows

    data = RunData.open(joined.config, None if origin.state is None else origin.state.rollout)
    if problem := nothing_left(origin.checkpoint, origin.step, data.num_rollout):
        raise CheckpointError(problem)
    recorder = _open_recorder(joined.config, directory, origin, data.num_rollout, stack)
    return Opened(joined.config, origin, directory, joined.cluster, data, recorder, engines_may_start, launching, stack)


async def _start(opened: Opened) -> Started:
    """Load the trainer and wait for the engines."""
    with opened.recorder.phase("start", opened.origin.step):
        async with failing_with(opened.launching):  # a failed start of an engine ends the loading of a large model
            trainer = await _load_trainer(opened)
        if trainer is not None and not opened.engines_may_start.is_set():
            await trainer.offload()
        opened.engines_may_start.set()
        engines = await opened.launching
        if engines is None:
            return Started(opened, opened.config, trainer, None, None)
        teacher = await find_teacher(opened.config, engines, opened.stack)
        return Started(opened, opened.config.served_at(engines.served), trainer, engines, teacher)


async def _wire(started: Started, termination: Termination) -> Wired:
    """Connect trainer, engines and rollouts, and bring the engines to the trainer's weights."""
    opened, engines = started.opened, started.engines
    devices = _shared_devices(started)
    trainer = ColocatedTrainer(started.trainer, devices) if started.trainer is not None and devices is not None else started.trainer
    weights = _weight_sync(started, trainer, devices)
    if engines is not None:
        await opened.stack.enter_async_context(engines.watched(weights, devices))
        if trainer is not None:
            with opened.recorder.phase("sync", opened.origin.step):
                await weights.resync()
    builder = RolloutBuilder(started.config, opened.data, engines, started.teacher, lambda: weights.version, opened.stack)
    state = None if opened.origin.state is None else opened.origin.state.rollout
    rollouts, evaluator = builder.build(
        start=opened.origin.step, state=state, phase=opened.recorder.phase, end_early=termination.end_of_rollouts
    )
    evaluate: Evaluate | None = None
    if evaluator is not None:
        schedule = Schedule(started.config.eval.eval_interval, opened.data.num_rollout)
        evaluate = Evaluate(evaluator, schedule, opened.recorder)
    save = None if trainer is None else _save_checkpoint(opened, trainer)
    return Wired(started, trainer, weights, rollouts, evaluate, save, _periodic(opened, evaluate, save))


async def _loop(wired: Wired, termination: Termination) -> Outcome:
    """Walk the data: evaluate the untrained policy, then sample and train."""
    opened, config = wired.started.opened, wired.started.config
    if wired.evaluate is not None and opened.origin.step == 0 and not config.eval.skip_eval_before_train:
        await wired.evaluate.evaluate(num_rollouts=0)
    gc.freeze()  # all objects so far live as long as the run; full collections, a tenth of a second each, can skip them
    opened.recorder.start(opened.origin.step)
    if wired.trainer is None:
        await sample_only(wired.rollouts, opened.recorder, wired.periodic)
    else:
        before = bound_hook(config, "before_train_step_path")
        loop = Loop(
            rollouts=wired.rollouts,
            trainer=wired.trainer,
            weights=wired.weights,
            recorder=opened.recorder,
            periodic=wired.periodic,
            sample_settings=sample_settings(config),
            advantage_settings=advantage_settings(config),
            update_interval=config.weight_sync.update_weights_interval,
            before_train_step=None if before is None else BeforeTrainStep(before, config.resolved_data_parallel_size),
        )
        await loop.run()
    if termination.requested:
        if wired.save is not None:
            await wired.save.save_last()
        raise asyncio.CancelledError
    return Outcome(opened.directory.path, wired.evaluate.history if wired.evaluate is not None else [])


def _report_interruption(config: Config, directory: RunDirectory, kind: type[BaseException] | None, *_: object) -> None:
    """Print how to resume after Ctrl-C or SIGTERM."""
    if kind is None or not issubclass(kind, asyncio.CancelledError):
        return
    save = save_directory(config, directory.path)
    iteration = newest_iteration(save)
    print(f"interrupted; run directory: {directory.path}", file=sys.stderr)
    if iteration is None:
        print("it has no checkpoint yet (--save-interval)", file=sys.stderr)
    else:
        command = f"fuligo train --config {directory.config_file} --run-dir {directory.path} --load {save}"
        print(f"resume after rollout {iteration} with: {command}", file=sys.stderr)


async def _launch_engines(may_start: asyncio.Event, joined: Joined, directory: RunDirectory, stack: AsyncExitStack) -> Engines | None:
    await may_start.wait()
    return await launch_engines(joined.config, directory, stack, joined.cluster)


async def _cancel(task: asyncio.Task[Engines | None]) -> None:
    """Stop an engine that is still starting when the run fails."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _load_trainer(opened: Opened) -> Trainer | None:
    """Load the trainer, and restore its checkpoint; None with --debug-rollout-only."""
    config, origin, stack = opened.config, opened.origin, opened.stack
    if config.debug.debug_rollout_only:
        return None
    settings = trainer_settings(config, resolve_device(config), initial_weights=origin.initial_weights, num_rollout=opened.data.num_rollout)
    if opened.cluster is None:
        from fuligo.trainer.ranks.trainer import LocalTrainer

        trainer = LocalTrainer(settings)
    else:
        trainer = opened.cluster.trainer(settings, opened.directory.path)
    stack.push_async_callback(trainer.close)
    await stack.enter_async_context(while_watching(trainer.watch()))
    await trainer.load()
    if origin.checkpoint is not None:
        await trainer.restore(origin.checkpoint)
    return trainer


def _shared_devices(started: Started) -> ColocatedDevices | None:
    """Return the devices that trainer and engines share; None if each has its own, or one of them is missing."""
    if started.trainer is None or started.engines is None or not started.config.takes_turns:
        return None
    return share_devices(started.config, started.trainer, started.engines)


def _weight_sync(
    started: Started, trainer: Trainer | None, devices: ColocatedDevices | None
) -> WeightSync | ColocatedWeightSync | VersionCounter:
    opened, version = started.opened, started.opened.origin.policy_version
    if trainer is None or started.engines is None:
        return VersionCounter(version)
    return build_weight_sync(opened.config, trainer, started.engines.group, version=version, cluster=opened.cluster, devices=devices)


def _open_recorder(config: Config, directory: RunDirectory, origin: Origin, num_rollout: int, stack: AsyncExitStack) -> RunRecorder:
    flags = config.observability
    progress = open_progress(flags.progress, str(directory.path), num_rollout, start=origin.step)
    directory.trace.on_phase = progress.phase
    kept = [record for record in directory.evaluation_records() if record["num_rollouts"] == origin.step]
    sinks = open_sinks(config, directory.path, start=origin.step, kept=kept)
    for sink in sinks:
        stack.callback(sink.close)
    stack.enter_context(progress)
    return RunRecorder(
        directory,
        progress,
        sinks,
        save_samples=flags.save_samples,
        reward_key=config.reward.reward_key,
        eval_reward_key=config.resolved_eval_reward_key,
    )


def _save_checkpoint(opened: Opened, trainer: Trainer) -> SaveCheckpoint:
    flags = opened.config.checkpoint
    store = CheckpointStore(save_directory(opened.config, opened.directory.path), keep=flags.keep_checkpoints)
    save = SaveCheckpoint(
        store,
        trainer,
        Schedule(flags.save_interval, opened.data.num_rollout),
        opened.recorder,
        config_text=opened.directory.config_file.read_text(),
        export_to=flags.save_hf,
        in_background=flags.async_save,
        keeps_last=flags.save_on_sigterm is not None,
    )
    opened.stack.push_async_callback(save.abandon)
    return save


def _periodic(opened: Opened, evaluate: Evaluate | None, save: SaveCheckpoint | None) -> list[Periodic]:
    """Return the periodic tasks in their order: when a checkpoint appears, everything about its last step is on disk."""
    debug_data = opened.config.debug.save_debug_rollout_data
    tasks: list[Periodic | None] = [None if debug_data is None else SaveDebugRollout(debug_data), evaluate, save]
    return [task for task in tasks if task is not None]
