"""Standby ranks: processes that have imported the trainer's modules and wait to replace lost ranks (--max-restarts)."""

import asyncio
import logging
import socket

from fuligo.trainer.ranks.commands import SharedCommand, call_rank
from fuligo.trainer.ranks.connected import ConnectedRank, start_process
from fuligo.trainer.ranks.handle import RankLostError
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.settings import TrainerSettings

logger = logging.getLogger(__name__)


class StandbyRanks:
    """Rank processes on this machine for a run's successive trainers; from the second trainer on, they are started before they are needed.

    They are new processes, not forks, because forking a process with threads or CUDA is not safe.

    Args:
        num_restarts: largest number of trainers after the first.
    """

    def __init__(self, num_restarts: int) -> None:
        self._num_trainers_left = 1 + num_restarts
        self._waiting: dict[int, ConnectedRank] = {}
        """Standby processes by rank."""
        self._imports: set[asyncio.Task[None]] = set()

    def take(self, size: int) -> list[ConnectedRank]:
        """Return a process for each rank of a trainer: its standby, which may still be importing, or else a new process."""
        self._num_trainers_left -= 1
        waiting, self._waiting = {rank: standby for rank, standby in self._waiting.items() if standby.is_alive}, {}
        if waiting:
            logger.info("%d of %d trainer ranks start from standby processes", len(waiting), size)
        host = socket.gethostname()
        return [waiting.get(rank) or start_process(rank, size, host) for rank in range(size)]

    def prepare(self, settings: TrainerSettings) -> None:
        """Start a standby for every rank, unless no further trainer is allowed; return before they are ready.

        Args:
            settings: settings of the current trainer; the next one imports the same modules.
        """
        if self._num_trainers_left == 0:
            return
        host = socket.gethostname()
        for rank in range(settings.num_ranks):
            try:
                standby = start_process(rank, settings.num_ranks, host)
            except OSError as error:
                logger.warning("cannot start a standby of trainer rank %d: %s; a restart will take longer", rank, error)
                continue
            self._waiting[rank] = standby
            task = asyncio.create_task(self._import(standby, settings))
            self._imports.add(task)
            task.add_done_callback(self._imports.discard)

    async def close(self) -> None:
        """Stop all standbys."""
        waiting, self._waiting = list(self._waiting.values()), {}
        await asyncio.gather(*(standby.close(failed=True) for standby in waiting))
        await asyncio.gather(*self._imports)

    async def _import(self, standby: ConnectedRank, settings: TrainerSettings) -> None:
        """Make a standby import the worker's modules; stop it if that fails."""
        try:
            failure = (await standby.run(SharedCommand(call_rank(Rank.import_worker, settings)))).error
        except RankLostError as error:
            failure = error
        if failure is None or self._waiting.get(standby.rank) is not standby:  # taken or closed meanwhile
            return
        del self._waiting[standby.rank]
        logger.warning("standby of trainer rank %d ended: %s; a restart will take longer", standby.rank, failure)
        await standby.close(failed=True)
