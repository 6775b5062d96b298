"""One engine of a fleet: server, client, restarts and health."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.sglang.server import Server
from fuligo.errors import EngineError

ENDING_S = 15.0
"""Seconds that a crashed SGLang may take to end: it closes its port first, then logs the error."""
POLL_S = 0.5
"""Seconds between checks whether a server that does not answer has ended."""


@dataclass(slots=True)
class FleetEngine:
    """Engine of a fleet. A restart replaces the server and the client."""

    server: Server
    client: InferenceEngine
    health_timeout_s: float
    num_restarts: int = 0
    restart: asyncio.Task[None] | None = None
    is_moving: bool = False
    """True while the engine's processes are being started or stopped: the device memory that they hold is then unknown."""

    @property
    def is_restarting(self) -> bool:
        """True while a restart is in progress. Raises EngineError if the restart failed."""
        if self.restart is not None and self.restart.done() and not self.restart.cancelled():
            self.restart.result()
        return self.restart is not None

    async def is_dead(self, *, ask_health: bool) -> bool:
        """Return whether the engine's process has ended or, with `ask_health`, its health check fails."""
        if not self.server.alive:
            return True
        return ask_health and not await self.server.answers(self.health_timeout_s)

    async def serves(self) -> bool:
        """Return whether the server and its scheduler answer; a scheduler can hang forever in a broken process group.

        Return False once a control call was overdue: whether the engine is paused, and which memory it holds, is then unknown.
        """
        if self.client.is_overdue:
            return False
        return not await self.is_dead(ask_health=True) and await self.client.scheduler_answers(self.health_timeout_s)

    async def answers_or_ends(self) -> bool:
        """Return whether the server answers within `ENDING_S`. If it does not, it gets this time to write the reason to its log and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                while self.server.alive:
                    if await self.server.answers(ENDING_S):
                        return True
                    await asyncio.sleep(POLL_S)
        return False

    def does_not_answer(self) -> EngineError:
        return EngineError(
            f"{self.server.settings.name} ({self.server.url}) does not answer; its log is {self.server.settings.log_file}. "
            "Resume from the last checkpoint; with --use-fault-tolerance it would have been restarted."
        )
