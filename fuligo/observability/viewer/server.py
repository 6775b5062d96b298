"""Server of `fuligo view`."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

import uvicorn

from fuligo.observability.viewer.access import is_loopback
from fuligo.observability.viewer.api import make_app
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.watcher import Watcher

SHUTDOWN_S = 1


def token_for(host: str, token: str | None) -> str | None:
    """Return the given token, or a new one if other machines can reach the server."""
    return token or (None if is_loopback(host) else secrets.token_urlsafe(18))


def address(host: str, port: int, token: str | None) -> str:
    """Return the address to open in a browser."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def serve(runs: Sequence[RunReader], listener: socket.socket, token: str | None) -> None:
    """Serve until SIGINT or SIGTERM."""
    watcher = Watcher(runs)
    app = make_app(runs, token=token, cookie=f"fuligo_view_{listener.getsockname()[1]}", watcher=watcher)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    watcher.start()
    uvicorn.Server(config).run(sockets=[listener])
