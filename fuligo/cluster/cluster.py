"""A run's share of a Ray cluster: its nodes, and the trainer's ranks and engines on them."""

import asyncio
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from fuligo.cluster.connection import connected
from fuligo.cluster.engines import RemotePart, RemoteServer
from fuligo.cluster.placement import Placement, engine_parts, place
from fuligo.cluster.rank import ActorRank, TrainerRank
from fuligo.cluster.reservation import AGENT_TIMEOUT_S, Bundle, Device, Reservation, reserve, start_agent
from fuligo.config import Config
from fuligo.engines.backend import EnginePlace, SettingsT
from fuligo.errors import ConfigError, TrainerError
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.trainer import RankedTrainer

SILENCE_S = 30.0
"""Seconds in which the agent of a node must answer before ranks start on it."""


@dataclass(slots=True, frozen=True)
class Node:
    """Node of the run."""

    bundle: Bundle
    agent: Any
    """Handle of its `NodeAgent`."""
    gpus: tuple[str, ...]
    """The run's GPUs on the node by slot, as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""


class RayCluster:
    """The run's nodes, and the placement of ranks and engines on them; opened by `open_cluster`."""

    def __init__(self, config: Config, device: Device, placement: Placement, reservation: Reservation, nodes: Sequence[Node]) -> None:
        self._environment = config.cluster.env
        self.device: Device = device
        self._placement = placement
        self._reservation = reservation
        self._nodes = nodes
        # Engines see the run's GPUs on their node, numbered from 0.
        self._parts: dict[str, tuple[RemotePart, ...]] = {
            f"engine {number}": tuple(
                RemotePart(nodes[part.node].agent, nodes[part.node].bundle.host, part.slots if nodes[part.node].gpus else ())
                for part in engine_parts(slots, name=f"engine {number}")
            )
            for number, slots in enumerate(placement.engines)
        }

    async def engine_places(self, port_sizes: Sequence[int]) -> list[EnginePlace]:
        """Return the places of the engines, in order, with ports claimed on their nodes."""
        firsts = [parts[0] for parts in self._parts.values()]
        ports = await asyncio.gather(*(part.agent.claim_ports.remote(tuple(port_sizes)) for part in firsts))
        return [
            EnginePlace(part.host, its_ports, part.gpu_ids, num_nodes=len(parts))
            for part, its_ports, parts in zip(firsts, ports, self._parts.values())
        ]

    def start_engine(self, settings: SettingsT) -> RemoteServer[SettingsT]:
        """Start an engine on its nodes; return before it is ready."""
        return RemoteServer(settings, self._parts[settings.name])

    def trainer(self, settings: TrainerSettings, logs: Path) -> RankedTrainer:
        """Return a trainer whose ranks are actors on the nodes. `logs`: directory of the ranks' logs."""

        async def start_ranks() -> list[ActorRank]:
            nodes = [self._nodes[number] for number, _ in self._placement.ranks]
            silent = await silent_nodes(nodes)
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            require_hosts([node.bundle for node in nodes], alive - silent)
            return [self._rank(rank, logs / f"trainer-rank-{rank}.txt") for rank in range(len(self._placement.ranks))]

        return RankedTrainer(settings.with_absolute_paths(), start_ranks)  # nodes have other working directories

    async def check_paths(self, read: Sequence[Path], written: Sequence[Path]) -> None:
        """Check that all nodes see the run's files.

        `read`: paths that every node must see if they exist here. `written`: directories, created if missing, in which every node must see
        files that another node writes. Raises ConfigError with the first node that does not see all paths, and the paths that it lacks.
        """
        with ExitStack() as stack:
            marks = {stack.enter_context(_mark(path)): f"files written to {path} on another node" for path in written}
            here = {str(path.absolute()): str(path.absolute()) for path in read if path.exists()} | marks
            unseen = await asyncio.gather(*(node.agent.missing.remote(list(here)) for node in self._nodes))
        for node, missing in zip(self._nodes, unseen):
            if missing:
                raise ConfigError(
                    f"node {node.bundle.host} does not see {', '.join(here[path] for path in missing)}; put models, --run-dir and --save "
                    "on a disk that all nodes share, under the same path"
                )

    def sender_shares_machine_with(self, engines: Iterable[int]) -> bool:
        """Return whether rank 0 and these engines, by number, run on one node."""
        first = self._nodes[self._placement.ranks[0][0]].bundle.node_id
        return all(self._nodes[node].bundle.node_id == first for number in engines for node, _ in self._placement.engines[number])

    @property
    def sender_is_here(self) -> bool:
        """True if rank 0 runs on this process's machine."""
        return self._nodes[self._placement.ranks[0][0]].bundle.node_id == ray.get_runtime_context().get_node_id()

    def _rank(self, rank: int, log_file: Path) -> ActorRank:
        number, slot = self._placement.ranks[rank]
        node = self._nodes[number]
        environment = self._environment
        if self.device == "cuda":
            visible = {"CUDA_VISIBLE_DEVICES": node.gpus[slot], "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            environment = environment.merged(visible)
        actor = self._reservation.actor(
            TrainerRank,
            node.bundle,
            resources={},  # the node's agent holds them
            environment=environment,
            rank=rank,
            size=len(self._placement.ranks),
            host=node.bundle.host,
            log_file=str(log_file.absolute()),
        )
        return ActorRank(rank, node.bundle.host, actor, log_file.absolute())


def require_hosts(bundles: Sequence[Bundle], living: Collection[str]) -> None:
    """Check that the host of every rank is alive: Ray would let an actor wait forever for a lost host.

    `bundles`: bundle of each rank, in order. `living`: ids of the nodes that are alive. Raises TrainerError if a host is lost.
    """
    for rank, bundle in enumerate(bundles):
        if bundle.node_id not in living:
            raise TrainerError(
                f"cannot start trainer rank {rank} on {bundle.host}: the host has left the Ray cluster or does not answer; bring it back, "
                "or use another host or fewer hosts (--hostfile, --actor-num-nodes), and resume"
            )


async def silent_nodes(nodes: Iterable[Node], timeout_s: float = SILENCE_S) -> set[str]:
    """Return the ids of the nodes whose agents do not answer in time; Ray lists a lost host as alive for up to a minute."""
    agents = {node.bundle.node_id: node.agent for node in nodes}
    calls = (asyncio.wait_for(agent.gpus.remote(), timeout_s) for agent in agents.values())
    answers = await asyncio.gather(*calls, return_exceptions=True)
    # An agent may also have crashed, or Ray may already know that its host is lost.
    return {node_id for node_id, answer in zip(agents, answers, strict=True) if isinstance(answer, TimeoutError)}


async def open_cluster(config: Config, stack: AsyncExitStack, log_file: Path) -> RayCluster:
    """Connect to Ray, or start it on this machine, and reserve the run's nodes until the stack closes.

    `log_file`: log of Ray's processes if it is started here. Raises ConfigError if there is no cluster, it lacks the resources or
    starts no process in time, or the run has no process to place on it; EngineError if Ray cannot be started here.
    """
    placement = place(config)
    if not placement.node_sizes:
        reason = "it has no trainer ranks, and its embedded engine runs beside the driver"
        raise ConfigError(f"cannot place the run on Ray: {reason}; use fuligo train --launcher local")
    asked = config.cluster.device
    several_nodes = len(placement.node_sizes) > 1
    await stack.enter_async_context(
        connected(num_slots=sum(placement.node_sizes), device=asked, several_nodes=several_nodes, log_file=log_file)
    )
    device: Device = "cuda" if asked == "cuda" or (asked == "auto" and ray.cluster_resources().get("GPU", 0) > 0) else "cpu"
    reservation = await reserve(placement.node_sizes, device)
    stack.callback(reservation.close)
    agents = [start_agent(reservation, bundle, device, config.cluster.env) for bundle in reservation.bundles]
    try:
        async with asyncio.timeout(AGENT_TIMEOUT_S):
            gpus = await asyncio.gather(*(agent.gpus.remote() for agent in agents))
    except TimeoutError:
        hosts = ", ".join(bundle.host for bundle in reservation.bundles)
        raise ConfigError(
            f"cannot place the run: Ray did not start a process on each of {hosts} within {AGENT_TIMEOUT_S:g} s; see Ray's logs there"
        ) from None
    nodes = [Node(bundle, agent, its) for bundle, agent, its in zip(reservation.bundles, agents, gpus)]
    return RayCluster(config, device, placement, reservation, nodes)


@contextmanager
def _mark(directory: Path) -> Iterator[str]:
    """Keep a file with a unique name during the block, by which nodes check that they see the same directory; yield its path."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".seen-by-all-nodes-", dir=directory.absolute()) as file:
        yield file.name
