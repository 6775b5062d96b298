"""One run from its configuration to its end, in stages: open, begin, start, wire, loop.

With --max-restarts, all stages but the first run again after the loss of a trainer, from the newest checkpoint.
"""

import asyncio
import gc
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from fuligo.checkpoint.location import nothing_left
from fuligo.checkpoint.store import CheckpointStore, saving_to
from fuligo.config import Config
from fuligo.errors import CheckpointError, RankError
from fuligo.job.colocated import ColocatedTrainer, ColocatedWeightSync
from fuligo.job.ending import report_interruption, resume_command, save_after_failure
from fuligo.job.engines import Engines, build_weight_sync, find_teacher, launch_engines
from fuligo.job.lent import LentParts
from fuligo.job.origin import Origin, named_checkpoints, save_directory
from fuligo.job.periodic import Evaluate, SaveCheckpoint, SaveDebugRollout, Schedule
from fuligo.job.recorder import LogHooks, RunRecorder
from fuligo.job.rollouts import RolloutBuilder, RunData
from fuligo.job.stages import Begun, Opened, Started, Wired, join_cluster
from fuligo.job.trainer_settings import trainer_settings
from fuligo.job.watch import Termination, failing_with, while_watching
from fuligo.limits import freeze_garbage_collector
from fuligo.loop import Loop, Periodic, sample_only
from fuligo.models.device import resolve_device
from fuligo.observability.gpu_usage import GpuMonitor
from fuligo.observability.progress import open_progress, show_origin, warnings_before_progress
from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.sinks import open_sinks
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.protocol import UnfilledRolloutError
from fuligo.trainer.protocol import Trainer
from fuligo.trainer.ranks.standby import StandbyRanks
from fuligo.trainer.samples import BeforeTrainStep, DataPostProcess
from fuligo.trainer.settings import advantage_settings, bound_hook, sample_settings
from fuligo.weights.sync import VersionCounter, WeightSync

logger = logging.getLogger(__name__)
SPAWNING_S = 0.05
"""Time in which the event loop starts the engines' processes, before it is blocked by imports of the driver that take seconds."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """Result of a run."""

    run_dir: Path
    evaluations: list[Evaluation]
    """Evaluations since the run started or resumed, or its trainer was last restarted, in order. The first evaluation of a new run is of
    the untrained policy, unless --skip-eval-before-train is set."""


async def run_config(config: Config, termination: Termination, lent: LentParts | None = None) -> Outcome:
    """Run a configuration until its last rollout, or until `termination` ends it early.

    If the run fails, FuligoError is raised and everything recorded and saved until then is on disk.
    """
    async with AsyncExitStack() as stack:
        with warnings_before_progress(config.observability.progress):
            opened = await _open(config, stack, lent)
        origin, num_restarts, max_restarts = opened.origin, 0, config.checkpoint.max_restarts
        while True:
            async with AsyncExitStack() as recording:
                begun = _begin(opened, origin, recording)
                try:
                    return await _train(begun, termination)
                except RankError as error:
                    if num_restarts == max_restarts or termination.requested:
                        raise
                    num_restarts += 1
                    assert opened.store is not None, "there was a trainer"
                    opened.store.clear_up()
                    origin = opened.origin.after_saving_to(opened.store)
                    where = "the start of the run" if origin.checkpoint is None else f"{origin.checkpoint}, rollout {origin.step}"
                    logger.warning("%s; restarting the trainer from %s (restart %d of %d)", error.event, where, num_restarts, max_restarts)
            gc.unfreeze()  # lets the objects of the lost trainer's loop be freed


async def _train(begun: Begun, termination: Termination) -> Outcome:
    """Load a trainer and run the loop with it to the end of the run.

    Raises RankError if the trainer was lost; another may continue from the newest checkpoint.
    """
    async with AsyncExitStack() as stack:
        started = await _start(begun, stack)
        wired = await _wire(started, termination, stack)
        try:
            return await _loop(wired, termination)
        except UnfilledRolloutError as error:
            begun.recorder.record_unfilled(error)
            raise


async def _open(config: Config, stack: AsyncExitStack, lent: LentParts | None) -> Opened:
    """Open the run directory and the cluster; launch the engines in the background."""
    origin = Origin.find(config)
    run_dir = config.run_directory(datetime.now())
    directory = RunDirectory.create(run_dir, config, resume=(lent is not None and lent.resume) or origin.may_cut_back(config, run_dir))
    stack.callback(directory.close)
    stack.push(partial(report_interruption, config, directory))
    store = None
    if config.trains:
        save = save_directory(config, run_dir)
        stack.enter_context(saving_to(save))
        store = CheckpointStore(save, keep=config.checkpoint.keep_checkpoints, used=named_checkpoints(config, save))
    config, cluster = await join_cluster(config, origin.weights_to_read(config), directory, stack)

    standbys = None
    if config.trains and cluster is None and config.checkpoint.max_restarts > 0:
        standbys = StandbyRanks(config.checkpoint.max_restarts)
        stack.push_async_callback(standbys.close)
    engines_may_start = asyncio.Event()
    if not config.takes_turns:
        engines_may_start.set()
    launching = asyncio.create_task(launch_engines(config, directory, stack, cluster, engines_may_start, lent))
    stack.push_async_callback(_cancel, launching)
    await asyncio.sleep(SPAWNING_S)

    return Opened(config, origin, directory, cluster, lent, standbys, store, engines_may_start, launching, stack)


def _begin(opened: Opened, origin: Origin, stack: AsyncExitStack) -> Begun:
    """Cut the records back to the step at which the trainer begins, and open the data and the recorder.

    Raises CheckpointError if no rollout is left to train on, and DataError if the data are not those of the checkpoint.
    """
    config, directory = opened.config, opened.directory
    directory.cut_back(origin.step)
    if origin.state is not None:
        logger.info("resuming from %s at rollout %d", origin.checkpoint, origin.step)
    origin.rng.restore()
    with warnings_before_progress(config.observability.progress):
        data = RunData.open(config, None if origin.state is None else origin.state.rollout)
    if problem := nothing_left(origin.checkpoint, origin.step, data.num_rollout):
        raise CheckpointError(problem)
    if origin.checkpoint is not None and origin is opened.origin:  # a restart of the trainer is reported by a warning
        show_origin(config.observability.progress, origin.checkpoint, origin.step, data.num_rollout)
    return Begun(opened, origin, data, _open_recorder(config, directory, origin, data.num_rollout, stack))


async def _start(begun: Begun, stack: AsyncExitStack) -> Started:
    """Load the trainer and wait for the engines, which already run when the trainer is restarted."""
    opened = begun.opened
    with begun.recorder.phase("start", begun.origin.step):
        release = opened.config.takes_turns and opened.engines_may_start.is_set()
        if release:
            running = await opened.launching
            assert running is not None and running.devices is not None, "they take turns with the trainer"
            await running.devices.detach()
        async with failing_with(opened.launching):  # a failed start of an engine ends the loading of a large model
            trainer = await _load_trainer(begun, stack)
        if trainer is not None and not opened.engines_may_start.is_set():
            await trainer.offload()
        opened.engines_may_start.set()
        engines = await asyncio.shield(opened.launching)  # the engines outlive a trainer that is lost meanwhile
        if engines is None:
            return Started(begun, opened.config, trainer, None, None)
        if not engines.are_watched:
            await opened.stack.enter_async_context(engines.watched(are_synced=trainer is not None))
        if trainer is not None and engines.devices is not None:
            engines.devices.attach(trainer, is_loaded=release)
        engines.monitor.take()  # discards measurements from before the restart of a trainer
        teacher = await find_teacher(opened.config, engines, stack)
        return Started(begun, opened.config.served_at(engines.launched.served), trainer, engines, teacher)


async def _wire(started: Started, termination: Termination, stack: AsyncExitStack) -> Wired:
    """Connect trainer, engines and rollouts, and sync the trainer's weights to the engines."""
    begun, engines = started.begun, started.engines
    devices = None if engines is None else engines.devices
    trainer = ColocatedTrainer(started.trainer, devices) if started.trainer is not None and devices is not None else started.trainer
    weights = _weight_sync(started, trainer)
    if engines is not None and not isinstance(weights, VersionCounter):
        stack.enter_context(engines.synced_by(weights))
        with begun.recorder.phase("sync", begun.origin.step):
            await weights.resync()
    builder = RolloutBuilder(
        started.config, begun.data, engines, started.teacher, lambda: weights.version, stack, begun.opened.directory.path
    )
    state = None if begun.origin.state is None else begun.origin.state.rollout
    rollouts, evaluator = builder.build(
        start=begun.origin.step, state=state, phase=begun.recorder.phase, end_early=termination.end_of_rollouts
    )
    evaluate: Evaluate | None = None
    if evaluator is not None:
        schedule = Schedule(started.config.eval.eval_interval, begun.data.num_rollout)
        evaluate = Evaluate(evaluator, schedule, begun.recorder)
    save = None if trainer is None else _save_checkpoint(begun, trainer, stack)
    debug_data = started.config.debug.save_debug_rollout_data
    tasks: list[Periodic | None] = [None if debug_data is None else SaveDebugRollout(debug_data), evaluate, save]
    return Wired(started, trainer, weights, rollouts, evaluate, save, [task for task in tasks if task is not None])


async def _loop(wired: Wired, termination: Termination) -> Outcome:
    """Evaluate the untrained policy, then sample and train until the run ends."""
    begun, config = wired.started.begun, wired.started.config
    if wired.evaluate is not None and begun.origin.step == 0 and not config.eval.skip_eval_before_train:
        await wired.evaluate.evaluate(num_rollouts=0)
    freeze_garbage_collector()  # all objects so far live as long as the run; a full collection of them takes a tenth of a second
    begun.recorder.start(begun.origin.step)
    if wired.trainer is None:
        await sample_only(wired.rollouts, begun.recorder, wired.periodic)
    else:
        await _train_until_end(wired, wired.trainer, termination)
    if termination.requested and not wired.rollouts.all_handed_out:  # a signal in the last step leaves nothing to resume
        raise asyncio.CancelledError
    return Outcome(begun.opened.directory.path, wired.evaluate.history if wired.evaluate is not None else [])


async def _train_until_end(wired: Wired, trainer: Trainer, termination: Termination) -> None:
    """Train until the run ends. If a signal or a failure ends it early, save the last complete rollout, where the flags ask for that."""
    begun, config, save = wired.started.begun, wired.started.config, wired.save
    assert save is not None, "there is a trainer"
    before, post_process = bound_hook(config, "before_train_step_path"), bound_hook(config, "rollout_data_postprocess_path")
    loop = Loop(
        rollouts=wired.rollouts,
        trainer=trainer,
        weights=wired.weights,
        recorder=begun.recorder,
        periodic=wired.periodic,
        sample_settings=sample_settings(config),
        advantage_settings=advantage_settings(config),
        update_interval=config.weight_sync.update_weights_interval,
        requires_exact=config.train.exact_on_policy,
        post_process=None if post_process is None else DataPostProcess(post_process),
        before_train_step=None if before is None else BeforeTrainStep(before, config.resolved_data_parallel_size),
    )
    with termination.may_save(lambda: loop.is_training or save.has_unsaved):
        try:
            await loop.run()
        except (Exception, asyncio.CancelledError) as error:
            if config.checkpoint.save_last:
                command = resume_command(begun.config, begun.opened.directory)
                await save_after_failure(error, loop, save, wired.started.engines, command)
            raise
        if termination.requested:
            await save.save_last()


async def _cancel(task: asyncio.Task[Engines | None]) -> None:
    """Stop engines that are still starting when the run fails."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _load_trainer(begun: Begun, stack: AsyncExitStack) -> Trainer | None:
    """Load the trainer, restore its checkpoint, and compile its kernels if engines are starting; return None with --debug-rollout-only."""
    config, origin, cluster, lent = begun.config, begun.origin, begun.opened.cluster, begun.opened.lent
    if config.debug.debug_rollout_only:
        return None
    settings = trainer_settings(
        config,
        resolve_device(config),
        initial_weights=origin.initial_weights,
        num_rollout=begun.data.num_rollout,
        profile_dir=begun.opened.directory.path / "profile",
    )
    if cluster is not None:
        trainer = cluster.trainer(settings, begun.opened.directory.path)
    else:
        from fuligo.trainer.ranks.trainer import LocalTrainer, RankedTrainer

        if lent is None:
            trainer = LocalTrainer(settings, begun.opened.standbys)
        else:  # a command may wait for commands of all other runs
            trainer = RankedTrainer(replace(settings, command_timeout_s=settings.command_timeout_s * lent.num_runs), lent.ranks)
    stack.push_async_callback(trainer.close)
    await stack.enter_async_context(while_watching(trainer.watch()))
    await trainer.load()
    if origin.checkpoint is not None:
        await trainer.restore(origin.checkpoint)
    # Compiling now gains time only while an engine starts. On a shared GPU it would leave the engine less memory for its KV cache.
    if not begun.opened.launching.done() and not config.engine_capabilities.beside_trainer:
        await trainer.warm_up()
    return trainer


def _weight_sync(started: Started, trainer: Trainer | None) -> WeightSync | ColocatedWeightSync | VersionCounter:
    begun, engines, version = started.begun, started.engines, started.begun.origin.policy_version
    if trainer is None or engines is None:
        return VersionCounter(version)
    opened = begun.opened
    return build_weight_sync(
        begun.config,
        trainer,
        engines.group,
        version=version,
        resumes=begun.origin.state is not None,
        cluster=opened.cluster,
        devices=engines.devices,
        run_directory=opened.directory.path,
    )


def _open_recorder(config: Config, directory: RunDirectory, origin: Origin, num_rollout: int, stack: AsyncExitStack) -> RunRecorder:
    flags = config.observability
    progress = open_progress(flags.progress, str(directory.path), num_rollout, start=origin.step)
    directory.trace.on_phase = progress.phase
    kept = [record for record in directory.evaluation_records() if record["num_rollouts"] == origin.step]
    sinks = open_sinks(config, directory.path, start=origin.step, kept=kept)
    for sink in sinks:
        stack.callback(sink.close)
    stack.enter_context(progress)
    gpus = GpuMonitor.open() if config.cluster.device != "cpu" else None
    if gpus is not None:
        stack.callback(gpus.close)
    return RunRecorder(
        directory,
        progress,
        sinks,
        LogHooks.of(config),
        save_samples=flags.save_samples,
        reward_key=config.reward.reward_key,
        pass_key=config.resolved_eval_reward_key,
        gpus=gpus,
    )


def _save_checkpoint(begun: Begun, trainer: Trainer, stack: AsyncExitStack) -> SaveCheckpoint:
    flags, opened = begun.config.checkpoint, begun.opened
    assert opened.store is not None, "there is a trainer"
    save = SaveCheckpoint(
        opened.store,
        trainer,
        Schedule(flags.save_interval, begun.data.num_rollout, includes_last=flags.save_last),
        begun.recorder,
        config_text=opened.directory.config_file.read_text(),
        export_to=flags.save_hf,
        push_to=flags.push_to_hub,
        in_background=flags.async_save,
        keeps_last=flags.save_last or flags.save_on_sigterm is not None,
    )
    stack.push_async_callback(save.abandon)
    return save
