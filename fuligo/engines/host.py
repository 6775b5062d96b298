"""Addresses, interfaces and ports of this machine: its address for other hosts, listening sockets, and exclusive claims of ports."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from fuligo.errors import EngineError

if TYPE_CHECKING:
    from torch.distributed import TCPStore


logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACES = ("lo", "lo0")
_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def own_address(urls: Sequence[str]) -> str:
    """Return the address of the interface to `urls`; loopback if all are on this machine. Raises OSError if no route leads to one."""
    addresses = [_address_towards(urlsplit(url)) for url in urls]
    return next((address for address in addresses if not is_loopback(address)), addresses[0] if addresses else LOOPBACK)


def _address_towards(url: SplitResult) -> str:
    """Return this machine's address on the route to a URL. Raises OSError if no route leads to any of the host's addresses."""
    failure: OSError | None = None
    for family, kind, _, _, address in socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # chooses a route, sends nothing
                return probe.getsockname()[0]
        except OSError as error:  # a name may have IPv6 addresses that this machine cannot reach
            failure = failure or error
    raise failure or OSError(f"{url.hostname} has no address")


def bracketed(host: str) -> str:
    """Return the host as written before a port: `[::1]` for an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def endpoint(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"{bracketed(host)}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether the address or name is reachable only from this machine."""
    return host in ("localhost", "::1") or host.startswith(("127.", "::ffff:127."))


def use_loopback_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo and TensorPipe of this process and its children listen on the loopback interface, unless the user chose another.

    By default they use the interface of the host's name, which is reachable from the network. NCCL's choice is not changed: between the
    GPUs of a host its listener only exchanges addresses.
    """
    for _, name in socket.if_nameindex():
        if name in _LOOPBACK_INTERFACES:
            for variable in _VARIABLES:
                environment.setdefault(variable, name)


@contextmanager
def reachable_by_others(host: str) -> Iterator[None]:
    """Make a gloo group created in the block listen on the default interface, if `host` is not a loopback address.

    Ranks on this machine communicate over loopback, but a group with engines on other machines cannot.
    """
    chosen = os.environ.get(_VARIABLES[0])
    if is_loopback(host) or chosen not in _LOOPBACK_INTERFACES:
        yield
        return
    del os.environ[_VARIABLES[0]]
    try:
        yield
    finally:
        os.environ[_VARIABLES[0]] = chosen


def listening_store(host: str, port: int = 0, *, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """Open a TCPStore on a `listening_socket`; a plain one listens on every interface. `timeout` limits waits for a key."""
    from torch.distributed import TCPStore

    listener = listening_socket(host, port)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach())


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens only at `host`. If no interface has that address (NAT), log a warning and listen on all interfaces.

    `port`: 0 means any free port. Raises OSError if the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        logger.warning("%s is not an address of this machine's interfaces; listening on all of them", host)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)


FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Range of ports to claim: below the ports that the kernel uses for outgoing connections (Linux: from 32768)."""


class PortClaims(ExitStack):
    """Ports of this machine that no other run can claim while this object is open.

    A server binds its port seconds after it starts, and by then another run may have taken a port that was only checked to be free.
    Therefore each port is claimed by a name in Linux's abstract socket namespace, which the kernel frees when this process ends. Other
    systems have no such namespace; there a port is only checked to be free.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = FIRST_PORT

    def claim(self, size: int = 1) -> int:
        """Claim `size` consecutive free ports; return the first. Raises EngineError if there are none between 20000 and 32000."""
        for first in range(self._next, LAST_PORT - size):
            with ExitStack() as run:
                try:
                    for port in range(first, first + size):
                        _check_free(port)
                        if sys.platform == "linux":
                            _bind(run, socket.AF_UNIX, f"\0fuligo-port-{port}")
                except OSError:
                    continue
                self.enter_context(run.pop_all())
                self._next = first + size
                return first
        wanted = "a free port" if size == 1 else f"{size} consecutive free ports"
        raise EngineError(f"cannot find {wanted} from {self._next} to {LAST_PORT}; stop processes that listen on these ports")


def _check_free(port: int) -> None:
    """Check that a port is free by binding it briefly at all IPv4 and IPv6 addresses. Raises OSError if it is in use."""
    with ExitStack() as briefly:
        _bind(briefly, socket.AF_INET, ("", port))
        if socket.has_dualstack_ipv6():  # not on hosts without IPv6
            probe = briefly.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("::", port))


def _bind(stack: ExitStack, family: socket.AddressFamily, address: str | tuple[str, int]) -> None:
    """Bind an address until the stack closes. Raises OSError if it is in use."""
    stack.enter_context(socket.socket(family, socket.SOCK_STREAM)).bind(address)
