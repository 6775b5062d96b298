"""Contract of an engine backend (`--rollout-backend NAME`, folder `engines/NAME`), which starts engines and states their weight format."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self, TypeVar

from fuligo.config import Config
from fuligo.config.config import ServedModel
from fuligo.config.secret import Environment
from fuligo.engines.connection import ControlDeadlines
from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import PortClaims
from fuligo.engines.server_process import ServerProcess
from fuligo.errors import EngineError, FuligoError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.models.device import Device, Precision


class SharedDevices(Protocol):
    """Devices that a trainer and engines use in turn; implemented by `job.colocated.ColocatedDevices`."""

    async def to_engines(self) -> None:
        """Offload the trainer and let the engines, which hold the current weights, allocate their KV cache."""

    async def make_room(self) -> None:
        """Offload the trainer so that engines can start; return when the engines that are starting are up."""

    async def wait_for_room(self) -> None:
        """Wait until an engine may start: it sizes its KV cache by the free memory, so the trainer must have released its memory."""

    async def align(self, client: InferenceEngine, group: EngineGroup) -> None:
        """Make a restarted engine release the memory that the other engines of its group have released.

        Raises EngineError if the engine refuses, or does not answer.
        """


SyncRestarted = Callable[[InferenceEngine], Awaitable[bool]]
"""Callback that sends a restarted engine the current weights; returns False if that must wait for the next weight sync."""


class EngineFleet(Protocol):
    """Supervised engines of one model."""

    group: EngineGroup
    sync_restarted: SyncRestarted
    devices: SharedDevices | None
    """Devices shared with a trainer; None if the engines have their own devices."""

    @property
    def url(self) -> str:
        """Address that takes requests for the model."""
        ...

    async def serve_as_loaded(self, client: InferenceEngine) -> bool:
        """Put an engine back into service with the weights that it started with: the `SyncRestarted` of models that are never synced."""
        ...

    async def watch(self) -> None:
        """Restart dead engines until canceled. Raises EngineError if an engine died and must not be restarted, or died too often."""


class StartedProcess(Protocol):
    """Process or processes of engines."""

    async def check_alive(self) -> None:
        """Check that the processes are running. Raises EngineError with the last lines of the log if one has ended."""

    async def watch(self) -> None:
        """Wait until a process has ended that must not be restarted. Raises EngineError with the last lines of its log."""

    async def stop(self) -> None:
        """Stop the processes; return when they have ended."""


@dataclass(slots=True, frozen=True)
class LaunchedEngines:
    """Engines that a backend started."""

    group: EngineGroup
    policy: EngineFleet | None = None
    """Supervisor of the engines; None if no fleet supervises them."""
    others: Mapping[str, EngineFleet] = field(default_factory=dict)
    """Fleets of the other models, by name; their weights are never synced."""
    served: Mapping[str, ServedModel] = field(default_factory=dict)
    """Router of each model by the model's name, for hooks."""
    process: StartedProcess | None = None
    """Process of engines that are not restarted; None if a fleet watches the engines, or this process did not start them."""


@dataclass(slots=True, frozen=True)
class LentEngine:
    """Address at which one of several runs reaches a shared engine or its router."""

    url: str
    keys: EngineKeys
    number: int | None = None
    """Index among the engines; None for a single engine or a router."""
    num_ranks: int = 1


@dataclass(slots=True, frozen=True)
class LentEngines:
    """Shared engines as one of several runs reaches them; plain data that can be sent to the run's process."""

    run: str
    """Name of the run; part of its adapter's name and of its requests' ids."""
    engines: tuple[LentEngine, ...]
    router: LentEngine | None = None
    """Router in front of the engines; None if requests go to the engines themselves."""


@dataclass(slots=True, frozen=True)
class SharedEngines:
    """Engines that a backend started for several runs."""

    lent: tuple[LentEngines, ...]
    """Engines of each run, in the order of the runs."""
    fleet: EngineFleet | None = None


@dataclass(slots=True, frozen=True)
class EnginePlace:
    """Host, ports and GPUs of an engine."""

    host: str
    """Address of the engine's first node for driver and trainer."""
    ports: tuple[int, ...]
    """First port of each range of consecutive ports that is claimed on the first node."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs on the first node; empty on a CPU."""
    num_nodes: int = 1


@dataclass(slots=True, frozen=True)
class NodePart:
    """Part of an engine that one node starts."""

    number: int
    """Index of the node among the engine's nodes."""
    host: str
    """Address of the node."""
    gpu_ids: tuple[int, ...]
    """GPUs of the part among those that `environment` makes visible; empty on a CPU."""
    log_file: Path
    environment: Environment
    """Variables that the node sets for the part."""


class EngineSettings(Protocol):
    """Settings of one engine that hosts can start. They can be pickled, because each node of the engine gets a copy."""

    @property
    def name(self) -> str:
        """Name in messages and logs: `engine N`, where N is the engine's index in the run."""
        ...

    @property
    def url(self) -> str: ...

    @property
    def log_file(self) -> Path: ...

    @property
    def start_timeout_s(self) -> float: ...

    def with_absolute_paths(self) -> Self:
        """Return a copy in which all paths are absolute, for nodes with other working directories."""
        ...

    def start_part(self, part: NodePart, claims: PortClaims) -> ServerProcess:
        """Start the engine's part on this node; return before it is ready. `claims` claims ports of the node."""
        ...

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the engine reports within `timeout_s` seconds that it accepts requests."""
        ...

    async def require_key(self) -> None:
        """Check that the engine, once it accepts requests, requires its keys. Raises EngineError if it does not."""


SettingsT = TypeVar("SettingsT", bound=EngineSettings)
Settings_co = TypeVar("Settings_co", bound=EngineSettings, covariant=True)
PROBE_TIMEOUT_S = 5.0
"""Seconds to wait for the answer to one probe of a starting engine; probes are repeated until its `start_timeout_s` has passed."""


class Server(Protocol[Settings_co]):
    """Started engine, on this machine or others."""

    url: str
    is_lost: bool
    """True if the server's machine is lost: it cannot be restarted, and requests to it are never answered."""

    @property
    def settings(self) -> Settings_co: ...

    @property
    def alive(self) -> bool:
        """True if the server's processes run, as far as this process knows."""
        ...

    def check_alive(self) -> None:
        """Check that the server is running. Raises EngineError with the last lines of its log if it has ended."""

    async def wait_ready(self) -> None:
        """Wait until the server accepts requests. Raises EngineError with the last lines of its log if it does not."""

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the server's health check succeeds within `timeout_s` seconds."""
        ...

    async def stop(self) -> None:
        """Stop the server; return when it and all its children have ended."""


class EngineHosts(Protocol):
    """Machines of a cluster that run engines."""

    async def engine_places(self, port_sizes: Sequence[int]) -> list[EnginePlace]:
        """Return the places of all engines, in order.

        `port_sizes`: sizes of the ranges of consecutive ports to claim for each engine.
        """
        ...

    def start_engine(self, settings: SettingsT) -> Server[SettingsT]:
        """Start an engine on its nodes; return before it is ready."""
        ...


class EngineBackend(Protocol):
    """Engine backend; `config.engine_capabilities` describes what it supports."""

    async def launch(
        self, config: Config, directory: Path, stack: AsyncExitStack, hosts: EngineHosts | None, turn: asyncio.Event
    ) -> LaunchedEngines:
        """Start the engines of a run; return when they answer. Raises EngineError if an engine did not start.

        Args:
            directory: directory of the engines' logs
            stack: stops the engines when it closes
            hosts: machines for the engines; None: this one
            turn: set once engines may use their devices; only imports may be done before
        """
        ...

    async def launch_shared(self, configs: Sequence[Config], directory: Path, stack: AsyncExitStack) -> SharedEngines:
        """Start engines on this machine for several runs, each with an adapter; see `launch`.

        `configs`: configs of the runs; they agree on everything that the engines need.
        """
        ...

    def connect(self, config: Config, lent: LentEngines, stack: AsyncExitStack) -> LaunchedEngines:
        """Connect one of the runs to shared engines; `stack` closes the connections."""
        ...

    def engine_format(self, config: Config) -> EngineFormat:
        """Return how the tensors that engines load differ from the trainer's.

        Raises ConfigError if the engines cannot serve `--hf-checkpoint`, or cannot update its weights.
        """
        ...

    def weight_dtype(self, config: Config, device: Device) -> Precision | None:
        """Return the dtype in which the engines receive weights; None: the dtype of `--hf-checkpoint`."""
        ...

    def claimed_ports(self, config: Config) -> list[int]:
        """Return the sizes of the ranges of consecutive ports that a run claims if one machine has all its engines."""
        ...


def engine_backend(config: Config) -> EngineBackend:
    """Return the backend of a run: `BACKEND` in `engines/NAME/backend.py`."""
    return import_module(f"fuligo.engines.{config.resolved_rollout_backend}.backend").BACKEND


@asynccontextmanager
async def stopped_at_exit(process: StartedProcess) -> AsyncIterator[None]:
    """Stop the process at the end of the block.

    If the block raises a FuligoError and the process has died, raise the process's error with the block's message below it.
    """
    try:
        yield
    except FuligoError as error:
        try:
            await process.check_alive()
        except EngineError as cause:
            effect = str(error) if str(error) != str(cause) else ""
            raise EngineError("\n".join(filter(None, (str(cause), effect)))) from error
        raise
    finally:
        await process.stop()


def connect_to(config: Config, urls: Sequence[str], keys: EngineKeys, stack: AsyncExitStack) -> EngineGroup:
    """Connect to engines that nothing supervises, and return their group; `stack` closes the connections."""
    timeout_s = config.rollout.rollout_timeout_s
    deadlines = ControlDeadlines.of_others(request_timeout_s=timeout_s, start_timeout_s=config.engine.engine_start_timeout_s)
    retries = config.rollout.rollout_retries
    group = EngineGroup.connect(urls, keys=keys, retries=retries, timeout_s=timeout_s, deadlines=deadlines)
    stack.push_async_callback(group.close)
    return group
