"""Whether a run's processes are placed by Ray. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Literal

from fuligo.config import Config

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Of a running cluster: set by the user, by `fuligo launch`, and by Ray itself within a job."""


def chosen_launcher(config: Config, environment: Mapping[str, str] = os.environ) -> Literal["local", "ray"]:
    """--launcher; auto is ray inside a Ray cluster and for several nodes, unless torchrun started the processes."""
    asked = config.cluster.launcher
    if asked != "auto":
        return asked
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        return "local"
    several_nodes = (config.num_nodes > 1 and config.cluster.device != "cpu") or config.cluster.actor_num_nodes > 1
    return "ray" if several_nodes or environment.get(ADDRESS_VARIABLE) else "local"


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """What Ray reads when it is imported. What the user set stays."""
    if not environment.get(ADDRESS_VARIABLE):
        # A cluster that starts here takes nobody without its token; Ray makes one where there is none.
        environment.setdefault("RAY_AUTH_MODE", "token")
    # Servers stand under a guard that ends them in good order; killed itself, it could not.
    environment.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
