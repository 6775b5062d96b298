"""Choice between environments in separate processes and in the process of the run."""

import logging
import sys
from dataclasses import dataclass
from typing import Literal, Protocol

from fuligo import callables
from fuligo.config import Config
from fuligo.environments.environment import Environment, EnvironmentSettings, Row
from fuligo.environments.isolation.environment import IsolatedEnvironment, ResumableIsolatedEnvironment
from fuligo.environments.isolation.workers import Workers
from fuligo.environments.load import EnvironmentFactory, load_environment
from fuligo.environments.threads import NoThreadError, call_in_thread
from fuligo.errors import ConfigError, FuligoError

logger = logging.getLogger(__name__)
Isolation = Literal["auto", "process", "none"]


class MakesEnvironments(Protocol):
    """Factory of the environments of a run."""

    def make(self, row: Row) -> Environment:
        """Create the environment of an episode. Raises whatever the environment's constructor raises."""
        ...

    async def close(self) -> None:
        """Stop the processes that the environments share."""


@dataclass(slots=True, frozen=True)
class IsolatedFactory:
    """Factory of environments in separate processes."""

    kind: type[Environment]
    settings: EnvironmentSettings
    workers: Workers

    def make(self, row: Row) -> Environment:
        return (ResumableIsolatedEnvironment if self.kind.resumable else IsolatedEnvironment)(row, self.settings, self.workers)

    async def close(self) -> None:
        try:
            await call_in_thread(self.workers.close, "end of environments")
        except NoThreadError:
            self.workers.close()


def environment_factory(config: Config) -> MakesEnvironments:
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
    """Return whether environments of a class run in separate processes.

    Raises ConfigError if `isolation` is "process" and the class cannot be isolated.
    """
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
        factory: EnvironmentFactory = load_environment(path, config.rollout.environment_settings)
        is_isolated(path, factory.kind, config.rollout.environment_isolation)
    except FuligoError as error:
        return [str(error)]
    return []
