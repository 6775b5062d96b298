"""Stages of a run. Each holds the parts that exist from then on, and is built from the stage before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuligo.checkpoint.store import CheckpointStore
from fuligo.cluster.node import prepare_environment
from fuligo.cluster.placement import place
from fuligo.config import Config
from fuligo.config.launcher import chosen_launcher
from fuligo.config.topology import engine_groups
from fuligo.errors import ConfigError
from fuligo.job.engines import Engines
from fuligo.job.lent import LentParts
from fuligo.job.origin import Origin
from fuligo.job.periodic import Evaluate, SaveCheckpoint
from fuligo.job.recorder import RunRecorder
from fuligo.job.rollouts import RunData
from fuligo.loop import Periodic, WeightSyncing
from fuligo.observability.run_directory import RunDirectory
from fuligo.rollout.producer import PacedRollouts
from fuligo.rollout.teacher import ServedTeacher
from fuligo.trainer.protocol import Trainer

if TYPE_CHECKING:
    from fuligo.cluster.cluster import RayCluster
    from fuligo.trainer.ranks.standby import StandbyRanks


@dataclass(slots=True, frozen=True)
class Opened:
    """Run whose directory and cluster are open and whose engines are starting. These parts outlive a lost trainer (--max-restarts)."""

    config: Config
    origin: Origin
    """Origin when the command started."""
    directory: RunDirectory
    cluster: RayCluster | None
    """Nodes of the run; None if everything runs on this machine."""
    lent: LentParts | None
    """Trainer and engines that several runs share; None if the run has its own."""
    standbys: StandbyRanks | None
    """Processes for trainers after the first; None without --max-restarts, on a cluster, or if nothing is trained."""
    store: CheckpointStore | None
    """Checkpoints of the run; None if nothing is trained."""
    engines_may_start: asyncio.Event
    """Set once no trainer holds memory of the engines' devices."""
    launching: asyncio.Task[Engines | None]
    """Task that starts the engines; its result is None if nothing is sampled."""
    stack: AsyncExitStack


@dataclass(slots=True, frozen=True)
class Begun:
    """Run whose data are open and whose records are cut back to the step at which it begins or resumes."""

    opened: Opened
    origin: Origin
    """Origin of the trainer: the run's, or the newest checkpoint after a restart."""
    data: RunData
    recorder: RunRecorder

    @property
    def config(self) -> Config:
        return self.opened.config


@dataclass(slots=True, frozen=True)
class Started:
    """Run whose trainer is loaded and whose engines answer."""

    begun: Begun
    config: Config
    """Configuration with the URLs of the engines, for hooks."""
    trainer: Trainer | None
    """Trainer with its weights; None with --debug-rollout-only."""
    engines: Engines | None
    """Engines that answer; None if nothing is sampled."""
    teacher: ServedTeacher | None
    """Teacher on an engine; None without a teacher, or if the trainer computes its scores."""


@dataclass(slots=True, frozen=True)
class Wired:
    """Run whose engines hold the trainer's weights."""

    started: Started
    trainer: Trainer | None
    """Trainer, which takes turns with the engines if they share devices; None with --debug-rollout-only."""
    weights: WeightSyncing
    rollouts: PacedRollouts
    evaluate: Evaluate | None
    """Evaluation; None without evaluation data."""
    save: SaveCheckpoint | None
    """Saving of checkpoints; None if nothing is trained."""
    periodic: list[Periodic]


async def join_cluster(
    config: Config, weights: Sequence[Path], directory: RunDirectory, stack: AsyncExitStack
) -> tuple[Config, RayCluster | None]:
    """Join the Ray cluster if the run uses one, and check that its nodes see the run's files.

    Return the configuration with `--device auto` resolved for the cluster, and the cluster, None if everything runs on this machine.

    Raises ConfigError if Ray is not installed, there is no cluster, it is too small for the run, or a node does not see `weights`, the
    models of the engines, or files that other nodes write to the run directory or --save.
    """
    if chosen_launcher(config) == "local":
        return config, None
    prepare_environment(several_nodes=len(place(config).node_sizes) > 1)
    try:
        from fuligo.cluster.cluster import open_cluster
    except ImportError as error:
        raise ConfigError("cannot run on Ray: the package ray is not installed; pip install 'fuligo[ray]'") from error

    cluster = await open_cluster(config, stack, directory.path / "ray.txt")
    served = [Path(group.model_path) for group in engine_groups(config) if group.model_path is not None]
    written = [directory.path, *([] if config.checkpoint.save is None else [Path(config.checkpoint.save)])]
    await cluster.check_paths([*weights, config.hf_checkpoint_path, *served], written)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": cluster.device})}), cluster
