"""Trainer ranks as the driver sees them, wherever they compute."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fuligo.trainer.ranks.commands import LEAVE, Answer, Command, R, SharedCommand
from fuligo.trainer.ranks.rank import RankExecutor

if TYPE_CHECKING:
    from fuligo.trainer.ranks.worker import RankWorker

LEAVE_TIMEOUT_S = 10.0


class RankLostError(Exception):
    """Loss of a rank, which will never answer; the text says how it ended."""


class RankHandle(ABC):
    """One rank: in this process (`InProcessRank`), in another process (`ConnectedRank`), or a Ray actor (`cluster.rank.ActorRank`)."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank = rank
        self.host = host

    @abstractmethod
    async def run(self, command: SharedCommand[R]) -> Answer[R]:
        """Have the rank run a command. Raises RankLostError if the rank is gone."""

    @abstractmethod
    async def close(self, *, failed: bool) -> None:
        """End the rank. `failed`: a command failed or is still running, so that the rank may hang."""

    def log_hint(self) -> str:
        """Return a sentence that says where the rank's output is, with its last lines if they can be read here."""
        return "Its output above may say more."

    async def leave(self) -> None:
        """Have the rank leave the process group; give up after a while, since it may hang in a collective."""
        leaving = asyncio.ensure_future(self.run(SharedCommand(LEAVE)))
        await asyncio.wait([leaving], timeout=LEAVE_TIMEOUT_S)
        if leaving.done():
            leaving.exception()  # a rank that is gone has left
        else:
            leaving.cancel()


class InProcessRank(RankHandle):
    """Rank that computes in a thread of this process. Its unexpected errors keep their type and traceback."""

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
