"""Network interface that torch's processes communicate through.

Gloo takes the interface that the host's name resolves to, which on Debian is loopback; NCCL guesses. On several nodes it must be the
interface by which the nodes know each other.
"""

import os
from collections.abc import MutableMapping

import psutil

from fuligo.engines.host import is_loopback, use_loopback_interface

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
