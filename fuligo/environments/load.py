"""Environment class of a run and its settings, checked before anything starts."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fuligo.config.hooks import load_hook
from fuligo.environments.environment import Environment, EnvironmentSettings, Row, environment_problem
from fuligo.errors import ConfigError, HookError


@dataclass(slots=True, frozen=True)
class EnvironmentFactory:
    """Factory of the environments of a run; this one makes them in the process of the caller."""

    kind: type[Environment]
    settings: EnvironmentSettings

    def make(self, row: Row) -> Environment:
        """Create the environment of an episode. Raises whatever the environment's constructor raises."""
        return self.kind(row, self.settings)

    async def close(self) -> None:
        """Stop the processes that the environments share; here there are none."""


def load_environment(path: str, settings: dict[str, Any]) -> EnvironmentFactory:
    """Import the class of --environment and parse --environment-settings.

    Raises HookError if the class cannot be imported or does not fit, and ConfigError if the settings do not fit the class.
    """
    kind: Any = load_hook("environment", path)
    if (problem := environment_problem(kind)) is not None:
        raise HookError(f"cannot use --environment {path}: {problem}")
    try:
        return EnvironmentFactory(kind, kind.Settings.model_validate(settings))
    except ValidationError as error:
        known = ", ".join(kind.Settings.model_fields) or "none"
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"--environment-settings does not fit {path}: {problems}; its settings: {known}") from None
