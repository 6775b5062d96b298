"""Choice of the launcher: this process or Ray. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from fuligo.config import Config

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Environment variable with the address of a running cluster; set by the user, by `fuligo launch`, and by Ray within a job."""


def chosen_launcher(config: Config, environment: Mapping[str, str] = os.environ) -> Literal["local", "ray"]:
    """Return --launcher; auto is ray within a Ray cluster and for several nodes, unless torchrun started the processes."""
    asked = config.cluster.launcher
    if asked != "auto":
        return asked
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        return "local"
    several_nodes = (config.num_nodes > 1 and config.cluster.device != "cpu") or config.cluster.actor_num_nodes > 1
    return "ray" if several_nodes or environment.get(ADDRESS_VARIABLE) else "local"
