"""HTTP servers in this process: uvicorn without signal handlers, a check of the Host header, and limits for clients without a key."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

T = TypeVar("T")
KEEP_ALIVE_S = 600
BACKLOG = 4096


class QuietServer(uvicorn.Server):
    """uvicorn server in a task of this event loop, which does not handle signals."""

    serving: asyncio.Task[None]

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listens = asyncio.Event()

    @classmethod
    async def start(cls, app: ASGIApp, listener: socket.socket, strangers: "Strangers", *, shutdown_s: int) -> Self:
        """Serve on a bound socket; return when the server listens. `shutdown_s`: seconds that requests get to end after `stop`."""
        server = cls(
            uvicorn.Config(
                app,
                interface="asgi3",
                loop="none",
                http=partial(Connection, strangers),  # pyrefly: ignore[bad-argument-type] - called like a class
                lifespan="off",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=shutdown_s,
            )
        )
        server.serving = asyncio.create_task(server.serve(sockets=[listener]))
        server.serving.add_done_callback(lambda _: server._listens.set())  # do not wait for a server that cannot start
        try:
            await server._listens.wait()
        except asyncio.CancelledError:
            await server.stop()  # the caller gets no server that it could stop
            raise
        if server.serving.done():
            server.serving.result()
        return server

    async def stop(self) -> None:
        self.should_exit = True
        await self.serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not capture signals: uvicorn would raise them again when it exits."""
        yield


async def unless_gone(http: Request, answer: Awaitable[T]) -> T | None:
    """Await an answer. If the client disconnects first, cancel it and return None."""
    working, disconnect = asyncio.ensure_future(answer), asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        disconnect.cancel()
        if not working.done():
            working.cancel()


def own_names(host: str) -> frozenset[str]:
    """Return the host names, besides addresses, under which clients may address a server that listens on `host`."""
    return frozenset(name.lower() for name in (host, "localhost", socket.gethostname(), socket.getfqdn()))


def is_foreign(host_header: str, names: frozenset[str]) -> bool:
    """Return whether a Host header is neither an IP address nor in `names`.

    Servers refuse such requests, because a web page whose host name resolves to this machine could send them (DNS rebinding).
    """
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
    """Unauthenticated connections of one server: those on which no request had a valid key yet."""

    max_connections: int = 4096
    """Number of connections beyond which the oldest is closed. Clients with a key authenticate at once, by their first request."""
    max_s: float = 30.0
    """Seconds after which a connection is closed."""
    max_bytes: int = 1 << 20
    """Number of bytes that may arrive without a key; a request's body is read only after its key was checked."""
    connections: "dict[Connection, asyncio.TimerHandle]" = field(default_factory=dict)
    """Time limit of each connection, oldest connection first."""

    def add(self, connection: "Connection") -> None:
        """Add a connection, and close the oldest one if there are too many."""
        while len(self.connections) >= self.max_connections:
            next(iter(self.connections)).abort()
        self.connections[connection] = asyncio.get_running_loop().call_later(self.max_s, connection.abort)

    def remove(self, connection: "Connection") -> None:
        """Remove a connection and its time limit."""
        if (timer := self.connections.pop(connection, None)) is not None:
            timer.cancel()


class Connection(HttpToolsProtocol):
    """HTTP/1.1 connection that is unauthenticated until `admit`."""

    def __init__(self, strangers: Strangers, **given: Any) -> None:
        super().__init__(**given)
        self._strangers = strangers
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self._strangers.connections:
            self._num_bytes += len(data)
            if self._num_bytes > self._strangers.max_bytes:
                self.abort()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.scope[_ENTRY] = self  # pyrefly: ignore[bad-typed-dict-key] - read only by `admit`

    def abort(self) -> None:
        """Close the connection without an answer."""
        self._strangers.remove(self)
        self.transport.abort()

    def admitted(self) -> None:
        """Lift the limits of this connection."""
        self._strangers.remove(self)

    def renew(self) -> None:
        """Reset the limits of time and bytes."""
        self._num_bytes = 0
        if self in self._strangers.connections:
            self._strangers.remove(self)
            self._strangers.add(self)


def admit(scope: Scope) -> None:
    """Lift the limits of the connection of a request that had a key."""
    if (connection := scope.get(_ENTRY)) is not None:
        connection.admitted()


def renew(scope: Scope) -> None:
    """Reset the limits of a connection after a request that needs no key, so that probes may keep their connection."""
    if (connection := scope.get(_ENTRY)) is not None:
        connection.renew()
