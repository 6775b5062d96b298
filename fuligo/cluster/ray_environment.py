"""Environment of the processes of a Ray cluster: token, variables that Ray reads on import, network interface. Does not import Ray."""

import os
import secrets
from collections.abc import MutableMapping

import psutil

from fuligo.config.launcher import ADDRESS_VARIABLE
from fuligo.engines.host import is_loopback, use_loopback_interface

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"

GUARDS_LIVE = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Variables for actors that keep Ray from killing an engine's guard, which shuts the engine down cleanly."""


def prepare_environment(*, several_nodes: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that Ray reads on import, unless the user set them."""
    starts_here = not several_nodes and not environment.get(ADDRESS_VARIABLE)
    has_token = environment.get(TOKEN_VARIABLE) or environment.get("RAY_AUTH_TOKEN_PATH")
    if starts_here and not has_token and environment.get("RAY_AUTH_MODE", "token") == "token":
        environment.update(token_environment(new_token()))  # a cluster that is started here belongs to this run alone
    for name, value in GUARDS_LIVE.items():
        environment.setdefault(name, value)


def new_token() -> str:
    """Return a new random token; any process that has it may use the cluster."""
    return secrets.token_hex(32)


def token_environment(token: str) -> dict[str, str]:
    """Return the environment of every process of a cluster that requires the token."""
    return {"RAY_AUTH_MODE": "token", TOKEN_VARIABLE: token}


_EXACTLY = "="
"""Prefix for an exact interface name; NCCL would take a bare name as a prefix of names."""


def use_interface_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo, TensorPipe and NCCL of this process and its children use the interface with this address, unless the user chose one.

    Args:
        address: this node's address; a loopback address on a single node, which leaves NCCL's choice unchanged
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
