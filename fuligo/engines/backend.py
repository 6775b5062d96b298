"""Contract of an engine backend, the folder behind `--rollout-backend NAME`: it starts engines and states the form of their weights."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

from fuligo.config import Config
from fuligo.config.config import ServedModel
from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup
from fuligo.engines.sglang.server import EnginePlace, Server, ServerSettings
from fuligo.errors import EngineError, FuligoError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.models.device import Device, Precision


class SharedDevices(Protocol):
    """Devices that a trainer and engines use in turns; `job.colocated.ColocatedDevices` implements it."""

    async def to_engines(self) -> None:
        """Offload the trainer and give the engines, which hold the current weights, their KV cache."""

    async def make_room(self) -> None:
        """Offload the trainer so that engines can start in its turn; return when those that are starting are up."""

    async def wait_for_room(self) -> None:
        """Return when an engine may start: it sizes its cache by the free memory, so the trainer must have released its own."""

    async def align(self, client: InferenceEngine, group: EngineGroup) -> None:
        """Release the memory of a restarted engine that the other engines of its group have released.

        Raises EngineError if the engine does not release it.
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
        """Return an engine to service with the weights it started with; the `SyncRestarted` of models that are never synced."""
        ...

    async def watch(self) -> None:
        """Restart dead engines until canceled. Raises EngineError if an engine died and must not be restarted, or died too often."""


@dataclass(slots=True, frozen=True)
class LaunchedEngines:
    """Engines that a backend started."""

    group: EngineGroup
    policy: EngineFleet | None = None
    """Their supervisor; None if they are not restarted."""
    others: Mapping[str, EngineFleet] = field(default_factory=dict)
    """Fleets of the other models, by name; their weights are never synced."""
    served: Mapping[str, ServedModel] = field(default_factory=dict)
    """Routers that take requests for each model, for hooks."""


@dataclass(slots=True, frozen=True)
class LentEngine:
    """Address of an engine that several runs share, or of its router, for one of them."""

    url: str
    keys: EngineKeys
    number: int | None = None
    """Index among the engines; None for a single engine or a router."""
    num_ranks: int = 1
    """Tensor-parallel processes."""


@dataclass(slots=True, frozen=True)
class LentEngines:
    """Engines that several runs share, for one of them; plain data for its process."""

    run: str
    """Name of the run in the engines."""
    engines: tuple[LentEngine, ...]
    router: LentEngine | None = None


@dataclass(slots=True, frozen=True)
class SharedEngines:
    """Engines that a backend started for several runs."""

    lent: tuple[LentEngines, ...]
    """Parts of the runs, in their order."""
    fleet: EngineFleet | None = None
    """Their supervisor; None if the runs themselves notice that an engine has died."""


class EngineHosts(Protocol):
    """Machines of a cluster that run engines."""

    async def engine_places(self) -> list[EnginePlace]:
        """Return the places of all engines, in order."""
        ...

    def start_engine(self, settings: ServerSettings) -> Server:
        """Start an engine on its nodes; return before it is ready."""
        ...


class EngineBackend(Protocol):
    """Engine backend; `config.engine_capabilities` has its facts."""

    async def launch(self, config: Config, directory: Path, stack: AsyncExitStack, hosts: EngineHosts | None) -> LaunchedEngines:
        """Start the engines of a run; return when they answer. Raises EngineError if an engine did not start.

        Args:
            directory: directory of the engines' logs
            stack: stops the engines when it closes
            hosts: machines for the engines; None: this one
        """
        ...

    async def launch_shared(self, configs: Sequence[Config], directory: Path, stack: AsyncExitStack) -> SharedEngines:
        """Start engines on this machine for several runs, each with an adapter; return when they answer.

        Args:
            configs: configs of the runs; they agree on everything that the engines need
            directory: directory of the engines' logs, which exists
            stack: stops the engines when it closes

        Raises:
            EngineError: an engine did not start
        """
        ...

    def connect(self, config: Config, lent: LentEngines, stack: AsyncExitStack) -> LaunchedEngines:
        """Return shared engines as one of the runs uses them; `stack` closes the connections."""
        ...

    def engine_format(self, config: Config) -> EngineFormat:
        """Return how the tensors that engines take differ from the trainer's.

        Raises ConfigError if the engines cannot serve `--hf-checkpoint`, or cannot update its weights.
        """
        ...

    def weight_dtype(self, config: Config, device: Device) -> Precision | None:
        """Return the type that the engines compute in, if flags set it; None: the type of `--hf-checkpoint`."""
        ...


class StartedProcess(Protocol):
    """Process or processes that can be checked and stopped."""

    async def check_alive(self) -> None:
        """Check that the processes have not ended. Raises EngineError if a process has ended, with the last lines of its log."""

    async def stop(self) -> None:
        """Stop the processes; return when they have ended."""


def engine_backend(config: Config) -> EngineBackend:
    """Return the backend of a run: `BACKEND` in `engines/NAME/backend.py`."""
    return import_module(f"fuligo.engines.{config.resolved_rollout_backend}.backend").BACKEND


@asynccontextmanager
async def stopped_at_exit(process: StartedProcess) -> AsyncIterator[None]:
    """Stop the process at the end of the block. If it has died, its error takes precedence over the block's, as the likely cause."""
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
