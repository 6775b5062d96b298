"""Environments in separate processes, and the choice between them and environments in the process of the run."""

import logging
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fuligo import callables
from fuligo.config import Config
from fuligo.environments.environment import AssistantTurn, Environment, Row, Start, Step
from fuligo.environments.isolation.messages import FailureError, Reply, decode_start, decode_step
from fuligo.environments.isolation.workers import ProcessEndedError, Worker, Workers
from fuligo.environments.load import EnvironmentFactory, load_environment
from fuligo.environments.threads import NoThreadError, call_in_thread
from fuligo.errors import ConfigError, FuligoError

logger = logging.getLogger(__name__)
Isolation = Literal["auto", "process", "none"]


class IsolatedEnvironment(Environment):
    """Proxy of an environment in a worker process. The first call takes the process; `close` gives it back or kills it.

    The methods raise FailureError if the environment failed or its process ended.
    """

    def __init__(self, row: Row, settings: Any, workers: Workers) -> None:
        super().__init__(row, settings)
        self._workers = workers
        self._worker: Worker | None = None
        self._num_steps: int | None = 0
        """Steps so far, for error messages; None after `restore`."""
        self._last: Reply | None = None

    async def reset(self) -> Start:
        return decode_start((await self._call("reset", name="reset", row=self.row)).result)

    async def restore(self, state: Any) -> None:
        self._num_steps = None
        await self._call("restore", name="restore", row=self.row, state=state)

    async def step(self, turn: AssistantTurn) -> Step:
        if self._num_steps is not None:
            self._num_steps += 1
        place = "step" if self._num_steps is None else f"step {self._num_steps}"
        return decode_step((await self._call(place, name="step", turn=turn)).result)

    async def close(self) -> None:
        """Close the environment. Its process is killed unless another episode can reuse it."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        is_reusable = False
        try:
            if worker.is_open and await worker.cancel():
                reply = await worker.call(name="close")
                is_reusable = reply.result.get("is_reusable") is True
        except ProcessEndedError as error:
            raise FailureError(f"its process {error} in close") from None
        finally:
            self._workers.give_back(worker) if is_reusable else self._workers.discard(worker)

    def state(self) -> Any:
        """Return the environment's state after the last call. Raises FailureError if its `state()` failed."""
        assert self._last is not None
        if self._last.state_failure is not None:
            raise FailureError(self._last.state_failure)
        return self._last.state

    async def _call(self, place: str, **request: Any) -> Reply:
        if self._worker is None:
            self._worker = await self._workers.take()
        try:
            self._last = await self._worker.call(**request)
        except ProcessEndedError as error:
            raise FailureError(f"its process {error} in {place}") from None
        return self._last


class ResumableIsolatedEnvironment(IsolatedEnvironment):
    """`IsolatedEnvironment` of a class that is `resumable`."""

    resumable: ClassVar[bool] = True


@dataclass(slots=True, frozen=True)
class IsolatedFactory(EnvironmentFactory):
    """Factory of environments in separate processes."""

    workers: Workers

    def make(self, row: Row) -> Environment:
        return (ResumableIsolatedEnvironment if self.kind.resumable else IsolatedEnvironment)(row, self.settings, self.workers)

    async def close(self) -> None:
        try:
            await call_in_thread(self.workers.close, "end of environments")
        except NoThreadError:
            self.workers.close()


def environment_factory(config: Config) -> EnvironmentFactory:
    """Load the environment class of a configuration and, if it is isolated, start the process that its episodes are forked from.

    Raises HookError if the class cannot be imported or does not fit, ConfigError if its settings are invalid or it cannot be isolated, and
    RolloutError if the process does not start.
    """
    flags = config.rollout
    assert flags.environment is not None
    loaded = load_environment(flags.environment, flags.environment_settings)
    if not is_isolated(flags.environment, loaded.kind, flags.environment_isolation):
        return loaded
    workers = Workers(
        flags.environment,
        flags.environment_settings,
        handed_over=tuple(flags.environment_variables),
        memory_bytes=None if flags.environment_memory_mb is None else flags.environment_memory_mb << 20,
    )
    workers.start()
    return IsolatedFactory(loaded.kind, loaded.settings, workers)


def is_isolated(path: str, kind: type[Environment], isolation: Isolation) -> bool:
    """Return whether environments of a class run in separate processes. Raises ConfigError if they must (`process`) and cannot."""
    if isolation == "none":
        return False
    reason = _obstacle(path, kind)
    if reason is None:
        return True
    if isolation == "process":
        raise ConfigError(f"cannot isolate the environment {path}: {reason}; set --environment-isolation none")
    logger.info("environments are not isolated: %s", reason)
    return False


def _obstacle(path: str, kind: type[Environment]) -> str | None:
    if not kind.isolated:
        return f"episodes of {kind.__name__} share objects (`isolated = False`)"
    if path.startswith(f"{callables.MODULE}."):
        return "other processes cannot import its class; move it to a module"
    if sys.platform != "linux":
        return f"environment processes need Linux, not {sys.platform}"
    return None


def environment_problems(config: Config) -> list[str]:
    """Check --environment and its settings, importing the class; return the problem as a list of one text, or an empty list."""
    path = config.rollout.environment
    if path is None:
        return []
    try:
        kind = load_environment(path, config.rollout.environment_settings).kind
        is_isolated(path, kind, config.rollout.environment_isolation)
    except FuligoError as error:
        return [str(error)]
    return []
