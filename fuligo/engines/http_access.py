"""Servers in this process: uvicorn without its signal handlers, refusal of foreign names, and limits for strangers without a key."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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


_ENTRY = "fuligo.connection"


@dataclass(eq=False)
class Strangers:
    """Connections of one server without a request that had a key, the oldest first."""

    max_connections: int = 4096
    """Limit beyond which the oldest is closed. A client with a key sends its request at once, so it is not among these for long."""
    max_s: float = 30.0
    max_bytes: int = 1 << 20
    """Limit of what is sent without a key; a body waits in the socket until the key was checked."""
    _connections: "dict[Connection, asyncio.TimerHandle]" = field(default_factory=dict)

    def add(self, connection: "Connection") -> None:
        """Watch a connection from now on."""
        while len(self._connections) >= self.max_connections:
            next(iter(self._connections)).abort()
        self._connections[connection] = asyncio.get_running_loop().call_later(self.max_s, connection.abort)

    def remove(self, connection: "Connection") -> None:
        """Stop watching a connection."""
        if (timer := self._connections.pop(connection, None)) is not None:
            timer.cancel()

    def renew(self, connection: "Connection") -> None:
        """Reset the time limit of a watched connection."""
        if connection in self._connections:
            self._connections.pop(connection).cancel()
            self.add(connection)

    def __contains__(self, connection: "Connection") -> bool:
        return connection in self._connections


class Connection(HttpToolsProtocol):
    """HTTP/1.1 connection that is unauthenticated until `admit`."""

    def __init__(self, strangers: Strangers, **given: Any) -> None:
        super().__init__(**given)
        self._strangers = strangers
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as its parent
        super().connection_made(transport)
        self._strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self._strangers:
            self._num_bytes += len(data)
            if self._num_bytes > self._strangers.max_bytes:
                self.abort()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.scope[_ENTRY] = self  # pyright: ignore[reportGeneralTypeIssues] - read only by `admit`

    def abort(self) -> None:
        """Close without an answer."""
        self._strangers.remove(self)
        self.transport.abort()

    def admitted(self) -> None:
        """Lift the limits."""
        self._strangers.remove(self)

    def renew(self) -> None:
        """Reset the limits of time and bytes."""
        self._num_bytes = 0
        self._strangers.renew(self)


def admit(scope: Scope) -> None:
    """Lift the limits of the connection of a request that had a key."""
    if (connection := scope.get(_ENTRY)) is not None:
        connection.admitted()


def renew(scope: Scope) -> None:
    """Reset the limits of a connection after a request that needs no key, so that probes may keep their connection."""
    if (connection := scope.get(_ENTRY)) is not None:
        connection.renew()
