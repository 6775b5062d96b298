"""Servers in this process: uvicorn without its signal handlers, and refusal of requests through names that are not this machine's."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class QuietServer(uvicorn.Server):
    """Server that reports when it listens and leaves signals to this process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not capture signals: uvicorn would raise them again when it exits."""
        yield


def own_names(host: str) -> frozenset[str]:
    """Return the names by which a server that listens on `host` may be called, besides addresses."""
    return frozenset(name.lower() for name in (host, "localhost", socket.gethostname(), socket.getfqdn()))


def is_foreign(host_header: str, names: frozenset[str]) -> bool:
    """Return whether a Host header is neither an address nor in `names`, as of a web page whose own name resolves to this machine."""
    name = host_header[1:].partition("]")[0] if host_header.startswith("[") else host_header.partition(":")[0]
    return name.lower() not in names and not _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
