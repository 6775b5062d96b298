"""Connection of a run to its Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuligo.cluster.placement import place
from fuligo.cluster.ray_environment import prepare_environment
from fuligo.config import Config
from fuligo.config.launcher import chosen_launcher
from fuligo.config.topology import engine_groups
from fuligo.errors import ConfigError
from fuligo.observability.run_directory import RunDirectory

if TYPE_CHECKING:
    from fuligo.cluster.cluster import RayCluster


@dataclass(slots=True, frozen=True)
class Joined:
    """Cluster of a run, and the configuration of the run on it."""

    config: Config
    """The run's configuration, with `--device auto` resolved for the cluster."""
    cluster: RayCluster | None
    """Nodes of the run; None if everything runs on this machine."""


async def join_cluster(config: Config, weights: Sequence[Path], directory: RunDirectory, stack: AsyncExitStack) -> Joined:
    """Join the Ray cluster if the run uses one.

    Args:
        weights: directories that its nodes read, in addition to the models of the engines
        stack: leaves the cluster when it closes

    Raises:
        ConfigError: there is no cluster, it is too small for the run, or a node does not see the files
    """
    if chosen_launcher(config) == "local":
        return Joined(config, None)
    prepare_environment(several_nodes=len(place(config).node_sizes) > 1)
    try:
        from fuligo.cluster.cluster import open_cluster
    except ImportError as error:
        raise ConfigError("--launcher ray: the package ray is not installed; pip install 'fuligo[ray]'") from error

    cluster = await open_cluster(config, stack, directory.path / "ray.txt")
    assert config.model.hf_checkpoint is not None, "validated"
    served = [Path(group.model_path) for group in engine_groups(config) if group.model_path is not None]
    written = [directory.path, *([] if config.checkpoint.save is None else [Path(config.checkpoint.save)])]
    await cluster.check_paths([*weights, Path(config.model.hf_checkpoint), *served], written)
    return Joined(config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": cluster.device})}), cluster)
