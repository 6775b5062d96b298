"""Environment of every process of a Ray cluster: its token, and what Ray reads when it is imported. Imports no Ray."""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping

from fuligo.config.launcher import ADDRESS_VARIABLE

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"

GUARDS_LIVE = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Of actors, whoever started their cluster: servers stand under a guard that ends them in good order; killed itself, it could not."""


def prepare_environment(*, several_nodes: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """What Ray reads when it is imported. What the user set stays."""
    starts_here = not several_nodes and not environment.get(ADDRESS_VARIABLE)
    has_token = environment.get(TOKEN_VARIABLE) or environment.get("RAY_AUTH_TOKEN_PATH")
    if starts_here and not has_token and environment.get("RAY_AUTH_MODE", "token") == "token":
        environment.update(token_environment(new_token()))  # a cluster that starts here is this run's own
    for name, value in GUARDS_LIVE.items():
        environment.setdefault(name, value)


def new_token() -> str:
    """Whoever has it may use the cluster."""
    return secrets.token_hex(32)


def token_environment(token: str) -> dict[str, str]:
    """Of every process of a cluster that takes nobody without the token."""
    return {"RAY_AUTH_MODE": "token", TOKEN_VARIABLE: token}
