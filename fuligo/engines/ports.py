"""Free TCP ports for servers that need them as arguments."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack

from fuligo.errors import EngineError

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the range of ports that the kernel uses for outgoing connections (Linux: from 32768)."""


class PortClaims:
    """Ports of this machine that no other claimant gets while this object is open.

    A server binds its port seconds after it is started, and by then another run may have taken a port that is merely free now. So each port
    is claimed by a name in Linux's abstract socket namespace, which the kernel frees when this process ends. Other systems have no such
    namespace; there a port is only checked to be free.
    """

    def __init__(self) -> None:
        self._held = ExitStack()
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
                self._held.enter_context(run.pop_all())
                self._next = first + size
                return first
        raise EngineError(
            f"this machine has no {size} consecutive free ports from {self._next} to {LAST_PORT}; stop the processes that use them"
        )

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> PortClaims:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_free(port: int) -> None:
    """Bind the port at all addresses of both families for a moment. Raises OSError if it is in use."""
    with ExitStack() as briefly:
        _bind(briefly, socket.AF_INET, ("", port))
        if socket.has_dualstack_ipv6():  # not on hosts without IPv6
            probe = briefly.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("::", port))


def _bind(stack: ExitStack, family: socket.AddressFamily, address: str | tuple[str, int]) -> None:
    """Bind an address as long as the stack is open. Raises OSError if it is in use."""
    stack.enter_context(socket.socket(family, socket.SOCK_STREAM)).bind(address)
