"""Choice of the launcher: this process or Ray. Imports no Ray."""

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal

from fuligo.config import Config
from fuligo.errors import ConfigError

_OF_TORCHRUN = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets in addition to WORLD_SIZE."""
COMMAND: ContextVar[tuple[str, ...]] = ContextVar("command", default=("fuligo", "train"))
"""Words of the command that started this run, up to the arguments of `fuligo train`."""
ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Environment variable with the address of a running cluster; set by the user, by `fuligo launch`, and by Ray within a job."""


def chosen_launcher(config: Config, environment: Mapping[str, str] = os.environ) -> Literal["local", "ray"]:
    """Return the launcher of `--launcher`; `auto` is ray if RAY_ADDRESS is set or the run has several nodes, and local under torchrun.

    Raises ConfigError as `world_size` does.
    """
    asked = config.cluster.launcher
    if asked != "auto":
        return asked
    if world_size(environment) > 1:
        return "local"
    several_nodes = (config.num_nodes > 1 and config.cluster.device != "cpu") or config.cluster.actor_num_nodes > 1
    return "ray" if several_nodes or environment.get(ADDRESS_VARIABLE) else "local"


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that torchrun started; 1 without torchrun.

    Raises ConfigError if `WORLD_SIZE` is not a number, or the other variables that torchrun sets with it are missing.
    """
    given = environment.get("WORLD_SIZE", "").strip()
    if given in ("", "1"):
        return 1
    if not given.isdecimal() or not int(given):
        raise ConfigError(f"WORLD_SIZE={given!r} in the environment is not a number of processes; unset it, or start fuligo with torchrun")
    if missing := [name for name in _OF_TORCHRUN if not environment.get(name, "").strip()]:
        raise ConfigError(
            f"WORLD_SIZE={given} is set in the environment without {', '.join(missing)}; unset WORLD_SIZE, or start fuligo with torchrun, "
            "which sets them all"
        )
    return int(given)
