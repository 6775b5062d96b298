"""Nodes of a run, reserved together, in physical order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fuligo.cluster.agent import NodeAgent
from fuligo.cluster.connection import node_addresses
from fuligo.cluster.ray_environment import GUARDS_LIVE
from fuligo.config.secret import Environment
from fuligo.errors import ConfigError

RESERVE_TIMEOUT_S = 120.0
AGENT_TIMEOUT_S = 120.0
"""For an actor to start on a free node."""
Device = Literal["cpu", "cuda"]


@dataclass(slots=True, frozen=True)
class Bundle:
    """One node's share of the run, as Ray gave it."""

    index: int
    """Number in the placement group."""
    size: int
    """GPUs; on a CPU processes."""
    node_id: str
    host: str


class Reservation:
    """Placement group with one bundle for each node: processes that share a node in the plan share one in the cluster."""

    def __init__(self, group: PlacementGroup, bundles: Sequence[Bundle]) -> None:
        self._group = group
        self.bundles = bundles
        """In the order of the plan's nodes."""

    def actor(self, cls: type, bundle: Bundle, *, resources: Mapping[str, float], environment: Environment, **arguments: Any) -> Any:
        """Start an actor of this class on the bundle's node; return its handle at once.

        The class gets `secrets`: Ray logs the variables of a `runtime_env`, so that actors set the secret ones themselves.
        """
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, **resources}
        return (
            ray.remote(cls)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle.index),
                runtime_env={"env_vars": {**GUARDS_LIVE, **environment.settings()}},
                max_concurrency=1000,  # coroutines: calls that wait do not block others
                **options,
            )
            .remote(secrets=environment.secrets(), **arguments)
        )

    def close(self) -> None:
        remove_placement_group(self._group)


async def reserve(node_sizes: Sequence[int], device: Device, *, timeout_s: float = RESERVE_TIMEOUT_S) -> Reservation:
    """Reserve nodes of these sizes.

    Args:
        node_sizes: GPUs (on a CPU processes) of each node

    Raises:
        ConfigError: the cluster lacks them, or does not provide them in time
    """
    resource = resource_of(device)
    strategy = "STRICT_SPREAD" if len(node_sizes) > 1 else "PACK"
    group = placement_group([{resource: size} for size in node_sizes], strategy=strategy)
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except BaseException as error:
        remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise ConfigError(_what_is_missing(node_sizes, resource, timeout_s)) from None
        raise
    hosts = node_addresses()
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    bundles = [Bundle(index, size, node_ids[index], hosts[node_ids[index]]) for index, size in enumerate(node_sizes)]
    return Reservation(group, physical_order(bundles))


def physical_order(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Sort bundles of equal size by address; each size keeps its places in the plan."""
    by_size = {size: sorted((b for b in bundles if b.size == size), key=_physical) for size in {bundle.size for bundle in bundles}}
    return [by_size[bundle.size].pop(0) for bundle in bundles]


def resource_of(device: Device) -> str:
    """Return the Ray resource that counts slots."""
    return "GPU" if device == "cuda" else "CPU"


def start_agent(reservation: Reservation, bundle: Bundle, device: Device, environment: Environment) -> Any:
    """Start a node's agent, which holds the whole bundle so that Ray tells it the GPUs."""
    resources = {"num_gpus" if device == "cuda" else "num_cpus": float(bundle.size)}
    return reservation.actor(NodeAgent, bundle, resources=resources, environment=environment, host=bundle.host)


def _physical(bundle: Bundle) -> tuple[tuple[int, ...], str, str]:
    parts = bundle.host.split(".")
    numbers = tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
    return numbers, bundle.host, bundle.node_id


def _what_is_missing(node_sizes: Sequence[int], resource: str, timeout_s: float) -> str:
    free = ray.available_resources()
    nodes = [f"{node['NodeManagerAddress']}: {node['Resources'].get(resource, 0):g}" for node in ray.nodes() if node["Alive"]]
    needed = ", ".join(map(str, node_sizes))
    return (
        f"the run needs {len(node_sizes)} node{'s' * (len(node_sizes) > 1)} with {needed} {resource}s; Ray did not provide them "
        f"within {timeout_s:g} s. It has {'; '.join(nodes)}, of which {free.get(resource, 0):g} are free. Wait for other jobs to end, add "
        "nodes, or take fewer (--actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus)"
    )
