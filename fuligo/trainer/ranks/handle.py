"""Driver's handles of trainer ranks, wherever the ranks run."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from fuligo.trainer.ranks.commands import Answer, Command, R, SharedCommand, call_rank
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.rank import Rank

if TYPE_CHECKING:
    from fuligo.trainer.ranks.worker import RankWorker

PING = replace(call_rank(Rank.ping), is_queued=False)
"""Heartbeat; a rank answers it as long as its interpreter runs."""
END_SAVE = replace(call_rank(Rank.end_save), is_queued=False)
"""Call of `Rank.end_save`; queued commands continue to run meanwhile."""
LEAVE = call_rank(Rank.leave)
"""Last command of a rank: leave the process group."""
LEAVE_TIMEOUT_S = 10.0
"""Seconds that the driver waits for a rank to leave the process group."""


class RankLostError(Exception):
    """Raised if a rank is lost and will no longer answer; the message says how it ended."""


class RankHandle(ABC):
    """One rank: in this process (`InProcessRank`), in another process (`ConnectedRank`), or a Ray actor (`cluster.rank.ActorRank`)."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank = rank
        self.host = host

    @abstractmethod
    async def run(self, command: SharedCommand[R]) -> Answer[R]:
        """Run a command on the rank and return its answer. Raises RankLostError if the rank is gone."""

    @abstractmethod
    async def close(self, *, failed: bool) -> None:
        """Stop the rank. `failed`: a command failed or is still running, so the rank may hang."""

    def log_hint(self) -> str:
        """Return a sentence that says where the rank's output is, with its last lines if they are readable on this host."""
        return "See its output above."

    async def leave(self) -> None:
        """Make the rank leave the process group; give up after `LEAVE_TIMEOUT_S`, because the rank may hang in a collective."""
        leaving = asyncio.ensure_future(self.run(SharedCommand(LEAVE)))
        await asyncio.wait([leaving], timeout=LEAVE_TIMEOUT_S)
        if leaving.done():
            leaving.exception()  # retrieved and ignored: a lost rank has left
        else:
            leaving.cancel()


class InProcessRank(RankHandle):
    """Rank that computes in a thread of this process. Unexpected errors keep their type and traceback."""

    def __init__(self, executor: RankExecutor, host: str) -> None:
        super().__init__(executor.rank.number, host)
        self._executor = executor

    @property
    def worker(self) -> RankWorker:
        return self._executor.rank.worker

    async def run(self, command: SharedCommand[R]) -> Answer[R]:
        work: Command[R] = command.command
        return await asyncio.wrap_future(self._executor.answer(lambda: work, is_queued=work.is_queued))

    async def close(self, *, failed: bool) -> None:
        await self.leave()
        self._executor.stop()
