"""The network interface that torch's processes talk through.

Gloo takes the one that the host's name leads to, which on Debian is the loopback interface; NCCL guesses. On several nodes it must be the
one by which the nodes know each other.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import psutil

_EXACTLY = "="
"""NCCL takes a bare name for the beginning of one."""


def use_interface_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo, TensorPipe and NCCL of this process and its children use the interface that has this address; what the user set stays.

    Args:
        address: this node's; a loopback address leaves everything as it is
    """
    name = None if address.startswith("127.") else _interface_of(address)
    if name is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
        environment.setdefault("TP_SOCKET_IFNAME", name)
        environment.setdefault("NCCL_SOCKET_IFNAME", _EXACTLY + name)


def _interface_of(address: str) -> str | None:
    """None where the node is known by an address that it does not have itself, behind a translation."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(its.address == address for its in addresses)), None)
