"""Address of this machine for others."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit


def own_address(urls: Sequence[str]) -> str:
    """Return the address of the interface that leads to `urls`; loopback if all of them are on this machine."""
    for url in urls:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            parts = urlsplit(url)
            probe.connect((parts.hostname or "", parts.port or 80))  # chooses a route, sends nothing
            address = probe.getsockname()[0]
        if not address.startswith("127."):
            return address
    return "127.0.0.1"
