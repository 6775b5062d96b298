"""Engines on the nodes of a Ray cluster, with the interface that backends need."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from ray.exceptions import RayError

from fuligo.cluster.rank import reason
from fuligo.engines.backend import PROBE_TIMEOUT_S, SettingsT
from fuligo.errors import EngineError

POLL_S = 0.2
STOP_TIMEOUT_S = 40.0
"""Seconds to wait until a node has stopped its part of an engine; longer than the grace periods of the part's processes."""
LOG_TIMEOUT_S = 10.0
"""Seconds to wait for the end of a log from a node."""


@dataclass(slots=True, frozen=True)
class RemotePart:
    """Part of an engine on one node."""

    agent: Any
    """Handle of the node's `NodeAgent`."""
    host: str
    gpu_ids: tuple[int, ...]


class RemoteServer(Generic[SettingsT]):
    """Engine on one or more nodes, dead if one of its parts has ended. Implements `engines.backend.Server`."""

    def __init__(self, settings: SettingsT, parts: Sequence[RemotePart]) -> None:
        """Start one process tree on each node, with the rendezvous at the first node's address; return before the engine is ready."""
        self.settings = settings = settings.with_absolute_paths()
        self.url = settings.url
        self._parts = parts
        self.is_lost = False
        log_file = settings.log_file
        self._starting = [
            part.agent.start.remote(settings, number, part.gpu_ids, log_file if len(parts) == 1 else _log_of_part(log_file, number))
            for number, part in enumerate(parts)
        ]
        self._endings = [asyncio.create_task(self._ending(number)) for number in range(len(parts))]
        """One task per part, done when the part has ended; its result describes how the part ended."""

    @property
    def alive(self) -> bool:
        return not any(ending.done() for ending in self._endings)

    def check_alive(self) -> None:
        for ending in self._endings:
            if ending.done():
                raise EngineError(ending.result())

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_s
        while not await self.answers(PROBE_TIMEOUT_S):
            self.check_alive()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.settings.name} on {self._parts[0].host} was not ready within {self.settings.start_timeout_s:g} s; its log "
                    f"({self.settings.log_file}) ends:\n{await self._last_lines()}"
                )
            await asyncio.sleep(POLL_S)
        await self.settings.require_key()

    async def answers(self, timeout_s: float) -> bool:
        return await self.settings.answers(timeout_s)

    async def stop(self) -> None:
        calls = (asyncio.wait_for(part.agent.stop.remote(self.settings.name), STOP_TIMEOUT_S) for part in self._parts)
        if any(isinstance(stopped, BaseException) for stopped in await asyncio.gather(*calls, return_exceptions=True)):
            self.is_lost = True  # nothing can be stopped on a lost node
        for ending in self._endings:
            ending.cancel()
        await asyncio.gather(*self._endings, return_exceptions=True)

    async def _last_lines(self) -> str:
        """Return the end of the log on the first node, or a note if that node does not answer."""
        try:
            async with asyncio.timeout(LOG_TIMEOUT_S):
                return await self._parts[0].agent.last_lines.remote(self.settings.name)
        except (RayError, TimeoutError):
            return "(its node does not answer)"

    async def _ending(self, number: int) -> str:
        part = self._parts[number]
        try:
            await self._starting[number]
            return f"on {part.host}: {await part.agent.ending.remote(self.settings.name)}"
        except RayError as error:
            return f"{self.settings.name} is lost with its node {part.host}: {reason(error)}"


def _log_of_part(log_file: Path, number: int) -> Path:
    return log_file.with_stem(f"{log_file.stem}-node-{number}")
