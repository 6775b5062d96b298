"""Actor on each node: holds the run's share of the node, claims ports there, and starts engines there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fuligo.cluster.interface import use_interface_of
from fuligo.config.secret import Environment
from fuligo.engines.ports import PortClaims
from fuligo.engines.server_process import last_lines
from fuligo.engines.sglang.server import ServerPorts, ServerSettings, SGLangServer
from fuligo.errors import EngineError
from fuligo.limits import raise_open_files

POLL_S = 0.5
APPEARANCE_TIMEOUT_S = 10.0


class NodeAgent:
    """Actor of a node; its engines end when it ends, for whatever reason.

    Args:
        host: this node's address
        secrets: variables of its environment
    """

    def __init__(self, host: str, secrets: Environment) -> None:
        import ray

        os.environ.update(secrets.reveal())
        use_interface_of(host)
        raise_open_files()  # also for the engines, which this process starts
        self._host = host
        self._gpus = in_physical_order(ray.get_gpu_ids())
        self._claims = PortClaims()
        self._servers: dict[str, SGLangServer] = {}

    async def gpus(self) -> tuple[str, ...]:
        """Return the GPUs of the node's share by slot, each as CUDA_VISIBLE_DEVICES calls it."""
        return self._gpus

    async def claim_engine_ports(self) -> ServerPorts:
        return ServerPorts.claim(self._claims)

    async def missing(self, paths: list[str]) -> list[str]:
        """Return the paths that this node does not see; a network disk may show new files late."""
        deadline = time.monotonic() + APPEARANCE_TIMEOUT_S
        while True:
            unseen = [path for path in paths if not Path(path).exists()]  # noqa: ASYNC240  # nothing else waits for it
            if not unseen or time.monotonic() > deadline:
                return unseen
            await asyncio.sleep(POLL_S)

    async def start(self, settings: ServerSettings) -> None:
        """Start an engine's part on this node; return before it is ready."""
        if settings.node_rank > 0:
            settings = replace(settings, listens_at=(self._host, self._claims.claim()))
        if self._gpus:  # an engine numbers the GPUs that it sees
            settings = replace(settings, environment=settings.environment.merged({"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)}))
        self._servers[settings.name] = SGLangServer(settings)

    async def ending(self, name: str) -> str:
        """Wait until the engine's process has ended; return how it ended, with the last lines of its log."""
        process = self._servers[name].process
        await process.ended()
        try:
            process.check_alive()
        except EngineError as error:
            return str(error)
        raise AssertionError("the process has ended")

    async def last_lines(self, name: str) -> str:
        return last_lines(self._servers[name].process.log_file)

    async def stop(self, name: str) -> None:
        """Stop an engine's part; return when nothing of it is left on this node."""
        server = self._servers.pop(name, None)
        if server is not None:
            await server.stop()


def in_physical_order(gpu_ids: Iterable[int | str]) -> tuple[str, ...]:
    """Sort GPUs by number.

    Args:
        gpu_ids: as Ray gives them, in any order: numbers, or whatever CUDA_VISIBLE_DEVICES held when Ray was started (UUIDs)
    """
    names = [str(gpu) for gpu in gpu_ids]
    return tuple(sorted(names, key=int) if all(name.isdigit() for name in names) else names)
