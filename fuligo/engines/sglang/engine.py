"""One engine of a fleet: its server, the client that speaks to it, its restart, and whether it lives."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from fuligo.engines.client import EngineClient
from fuligo.engines.sglang.server import Server
from fuligo.errors import EngineError

ENDING_S = 15.0
"""SGLang closes its port first when it crashes, then writes what happened, and ends seconds later."""
POLL_S = 0.5
"""Between looks whether it has ended."""


@dataclass(slots=True)
class FleetEngine:
    """As the fleet knows it. Server and client are replaced when it is restarted."""

    server: Server
    client: EngineClient
    health_timeout_s: float
    num_restarts: int = 0
    restart: asyncio.Task[None] | None = None
    is_moving: bool = False
    """Its processes are being started or ended: what they hold of the devices is in nobody's books."""

    @property
    def is_restarting(self) -> bool:
        """
        Raises:
            EngineError: the restart failed
        """
        if self.restart is not None and self.restart.done() and not self.restart.cancelled():
            self.restart.result()
        return self.restart is not None

    async def is_dead(self, *, ask_health: bool) -> bool:
        if not self.server.alive:
            return True
        return ask_health and not await self.server.answers(self.health_timeout_s)

    async def serves(self) -> bool:
        """It lives, and so does the part of it that samples: that may wait for good in a process group that broke.

        One that was too late once is not asked: nobody knows whether it is paused, or what of its memory it holds.
        """
        if self.client.is_overdue:
            return False
        return not await self.is_dead(ask_health=True) and await self.client.scheduler_answers(self.health_timeout_s)

    async def answers_or_ends(self) -> bool:
        """Whether it answers; one that does not gets the time to end, and to say why."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                while self.server.alive:
                    if await self.server.answers(ENDING_S):
                        return True
                    await asyncio.sleep(POLL_S)
        return False

    def does_not_answer(self) -> EngineError:
        """The error that names it."""
        return EngineError(
            f"{self.server.settings.name} ({self.server.url}) does not answer; its log is {self.server.settings.log_file}. "
            "Resume from the last checkpoint; with --use-fault-tolerance it would have been restarted."
        )
