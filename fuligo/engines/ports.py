"""Free TCP ports for servers that cannot choose their own."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack

from fuligo.errors import EngineError

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the range from which the kernel takes ports for outgoing connections (Linux: from 32768)."""


class PortClaims:
    """Ports of this machine that no other claimant gets while this object is open.

    A server binds its port seconds after it was told it: a port that is merely free now may be another run's by then. So each port is
    claimed by a name in Linux's abstract socket namespace, which the kernel gives back when this process ends. (Elsewhere there is no such
    namespace, and a port is only seen to be free.)
    """

    def __init__(self) -> None:
        self._held = ExitStack()
        self._next = FIRST_PORT

    def claim(self, size: int = 1) -> int:
        """The first of `size` consecutive ports that are free and claimed now.

        Raises:
            EngineError: there are no such ports between 20000 and 32000
        """
        for first in range(self._next, LAST_PORT - size):
            with ExitStack() as run:
                try:
                    for port in range(first, first + size):
                        _see_free(port)
                        if sys.platform == "linux":
                            _bind(run, socket.AF_UNIX, f"\0fuligo-port-{port}")
                except OSError:
                    continue
                self._held.enter_context(run.pop_all())
                self._next = first + size
                return first
        raise EngineError(f"no {size} consecutive free ports from {self._next} to {LAST_PORT} on this machine: end what holds them")

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> PortClaims:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _see_free(port: int) -> None:
    with ExitStack() as briefly:
        _bind(briefly, socket.AF_INET, ("", port))


def _bind(stack: ExitStack, family: socket.AddressFamily, address: str | tuple[str, int]) -> None:
    """
    Raises:
        OSError: somebody has it.
    """
    stack.enter_context(socket.socket(family, socket.SOCK_STREAM)).bind(address)
