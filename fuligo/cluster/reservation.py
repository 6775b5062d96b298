"""Reservation of a run's nodes, in physical order, and the actor on each node that claims ports and starts engines."""

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fuligo.cluster.node import GUARDS_LIVE, use_interface_of
from fuligo.config.python_path import with_inherited_path
from fuligo.config.secret import Environment
from fuligo.engines.backend import EngineSettings, NodePart
from fuligo.engines.host import LOOPBACK, PortClaims
from fuligo.engines.server_process import ServerProcess, last_lines
from fuligo.errors import ConfigError, EngineError
from fuligo.limits import raise_open_files

POLL_S = 0.5
APPEARANCE_TIMEOUT_S = 10.0
"""Seconds to wait for new files of another node to appear on a network disk."""


class NodeAgent:
    """Actor of a node that claims ports and starts engines; the engines end when it ends, even if it is killed."""

    def __init__(self, host: str, secrets: Environment, umask: int) -> None:
        import ray

        os.umask(umask)
        os.environ.update(secrets.reveal())
        use_interface_of(host)
        raise_open_files()  # also for the engines, which inherit the limit
        self._host = host
        self._gpus = in_physical_order(ray.get_gpu_ids())
        self._claims = PortClaims()
        self._servers: dict[str, ServerProcess] = {}

    async def gpus(self) -> tuple[str, ...]:
        """Return the run's GPUs on this node by slot, as CUDA_VISIBLE_DEVICES names them."""
        return self._gpus

    async def claim_ports(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Claim ranges of consecutive ports of these sizes; return the first port of each."""
        return tuple(map(self._claims.claim, sizes))

    async def missing(self, paths: list[str]) -> list[str]:
        """Return the paths that do not exist on this node, after waiting for them for up to `APPEARANCE_TIMEOUT_S`."""
        deadline = time.monotonic() + APPEARANCE_TIMEOUT_S
        while True:
            unseen = [path for path in paths if not Path(path).exists()]  # noqa: ASYNC240  # nothing else runs in this event loop
            if not unseen or time.monotonic() > deadline:
                return unseen
            await asyncio.sleep(POLL_S)

    async def start(self, settings: EngineSettings, number: int, gpu_ids: tuple[int, ...], log_file: Path) -> None:
        """Start part `number` of an engine on this node; return before it is ready."""
        environment = Environment({"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)} if self._gpus else {})
        part = NodePart(number, self._host, gpu_ids, log_file, environment)
        self._servers[settings.name] = settings.start_part(part, self._claims)

    async def ending(self, name: str) -> str:
        """Wait until the engine's process has ended; return how it ended, with the last lines of its log."""
        server = self._servers[name]
        await server.ended()
        try:
            server.check_alive()
        except EngineError as error:
            return str(error)
        raise AssertionError("the process has ended")

    async def last_lines(self, name: str) -> str:
        return last_lines(self._servers[name].log_file)

    async def stop(self, name: str) -> None:
        """Stop an engine's part; return when all its processes on this node have ended."""
        if (server := self._servers.pop(name, None)) is not None:
            await server.stop()


def in_physical_order(gpu_ids: Iterable[int | str]) -> tuple[str, ...]:
    """Sort GPU ids if all are numbers; others, as CUDA_VISIBLE_DEVICES named them when Ray was started (UUIDs), keep their order."""
    names = [str(gpu) for gpu in gpu_ids]
    return tuple(sorted(names, key=int) if all(name.isdigit() for name in names) else names)


RESERVE_TIMEOUT_S = 120.0
"""Seconds for the cluster to provide the nodes of a run."""
AGENT_TIMEOUT_S = 120.0
"""Seconds for an actor to start on a reserved node."""
Device = Literal["cpu", "cuda"]


@dataclass(slots=True, frozen=True)
class Bundle:
    """One node's share of the run, as Ray assigned it."""

    index: int
    """Index in the placement group."""
    size: int
    """Number of GPUs, or of processes on a CPU."""
    node_id: str
    host: str


class Reservation:
    """Placement group with one bundle per node, so that processes that share a node in the plan share one in the cluster."""

    def __init__(self, group: PlacementGroup, bundles: Sequence[Bundle]) -> None:
        self._group = group
        self.bundles = bundles
        """Bundles in the order of the plan's nodes."""

    def actor(self, cls: type, bundle: Bundle, *, resources: Mapping[str, float], environment: Environment, **arguments: Any) -> Any:
        """Start an actor of class `cls` on the bundle's node; return its handle at once.

        The class also gets the umask of this process, and secret variables as `secrets`, because Ray logs those of a `runtime_env`.
        """
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, **resources}
        return (
            ray.remote(cls)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle.index),
                runtime_env={"env_vars": {**GUARDS_LIVE, **with_inherited_path(environment.settings())}},
                max_concurrency=1000,  # calls are coroutines, so one that waits must not block others
                **options,
            )
            .remote(secrets=environment.secrets(), umask=_umask(), **arguments)
        )

    def close(self) -> None:
        remove_placement_group(self._group)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


async def reserve(node_sizes: Sequence[int], device: Device, *, timeout_s: float = RESERVE_TIMEOUT_S) -> Reservation:
    """Reserve a separate node for each size: a number of GPUs, or of processes on a CPU.

    Raises ConfigError if they do not become available within `timeout_s`.
    """
    resource = "GPU" if device == "cuda" else "CPU"
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
    nodes = [node for node in ray.nodes() if node["Alive"]]
    hosts = {node["NodeID"]: node["NodeManagerAddress"] if len(nodes) > 1 else LOOPBACK for node in nodes}
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    bundles = [Bundle(index, size, node_ids[index], hosts[node_ids[index]]) for index, size in enumerate(node_sizes)]
    return Reservation(group, physical_order(bundles))


def physical_order(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Sort the bundles of each size by address; the sequence of sizes stays, since it is the plan's."""
    by_size = {size: sorted((b for b in bundles if b.size == size), key=_physical) for size in {bundle.size for bundle in bundles}}
    return [by_size[bundle.size].pop(0) for bundle in bundles]


def start_agent(reservation: Reservation, bundle: Bundle, device: Device, environment: Environment) -> Any:
    """Start a node's agent, which takes all resources of the bundle, so that Ray assigns it all of the bundle's GPUs."""
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
        f"cannot place the run: it needs {len(node_sizes)} node{'s' * (len(node_sizes) > 1)} with {needed} {resource}s, but Ray did not "
        f"provide them within {timeout_s:g} s. The cluster has {'; '.join(nodes)}; {free.get(resource, 0):g} {resource}s are free. Wait "
        "for other jobs to end, add nodes, or use fewer (--actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus)"
    )
