"""Server of `fuligo view`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlencode

import uvicorn

from fuligo.observability.viewer.api import make_app
from fuligo.observability.viewer.run import RunReader, Watcher

SHUTDOWN_S = 1


def address(host: str, port: int, token: str) -> str:
    """Return the address to open in a browser, which ends with the token."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/?{urlencode({'token': token})}"


def serve(runs: Sequence[RunReader], listener: socket.socket, token: str) -> None:
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
