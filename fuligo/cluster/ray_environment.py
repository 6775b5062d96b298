"""Environment of every process of a Ray cluster: token, settings that Ray reads on import, network interface. Imports no Ray."""

import os
import secrets
from collections.abc import MutableMapping

import psutil

from fuligo.config.launcher import ADDRESS_VARIABLE
from fuligo.engines.host import is_loopback, use_loopback_interface

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"

GUARDS_LIVE = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Variables for actors: keep Ray from killing the guard of an engine, which shuts the engine down cleanly."""


def prepare_environment(*, several_nodes: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what Ray reads when it is imported; the user's own settings stay."""
    starts_here = not several_nodes and not environment.get(ADDRESS_VARIABLE)
    has_token = environment.get(TOKEN_VARIABLE) or environment.get("RAY_AUTH_TOKEN_PATH")
    if starts_here and not has_token and environment.get("RAY_AUTH_MODE", "token") == "token":
        environment.update(token_environment(new_token()))  # a cluster that starts here is this run's own
    for name, value in GUARDS_LIVE.items():
        environment.setdefault(name, value)


def new_token() -> str:
    """Return a new secret; any process that has it may use the cluster."""
    return secrets.token_hex(32)


def token_environment(token: str) -> dict[str, str]:
    """Return the environment of every process of a cluster that requires the token."""
    return {"RAY_AUTH_MODE": "token", TOKEN_VARIABLE: token}


_EXACTLY = "="
"""NCCL takes a bare name as a prefix."""


def use_interface_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set gloo, TensorPipe and NCCL of this process and its children to the interface with this address, unless the user chose one.

    Args:
        address: this node's; on a single node a loopback address, which leaves NCCL its own choice
    """
    if is_loopback(address):
        use_loopback_interface(environment)
        return
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, addresses in interfaces if any(its.address.partition("%")[0] == address for its in addresses)), None)
    if name is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
        environment.setdefault("TP_SOCKET_IFNAME", name)
        environment.setdefault("NCCL_SOCKET_IFNAME", _EXACTLY + name)
