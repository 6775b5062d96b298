"""Trainer and engine that several runs share, as one of them uses them."""

import asyncio
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fuligo.errors import EngineError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.trainer.ranks.connected import ConnectedRank
from fuligo.trainer.ranks.handle import RankHandle


@dataclass(slots=True, frozen=True)
class LentEngine:
    """Engine of one run in the process that serves all."""

    url: str
    keys: EngineKeys


class LentParts:
    """Parts that the process of all runs lends to the process of one.

    Args:
        control: brings the engine once it serves
        trainer: leads to the run's rank
        num_runs: runs that share them
    """

    def __init__(self, control: Connection, trainer: Connection, num_runs: int) -> None:
        self.num_runs = num_runs
        self._control = control
        self._trainer = trainer
        self._engine: LentEngine | None = None

    async def engine(self) -> LentEngine:
        """Return the engine when it serves.

        Raises:
            EngineError: the process of all runs has ended
        """
        if self._engine is None:
            try:
                self._engine = pickle.loads(await asyncio.to_thread(self._control.recv_bytes))
            except (EOFError, OSError) as error:
                raise EngineError("the process that all runs share ended before its engine served; see its output") from error
        assert self._engine is not None
        return self._engine

    async def ranks(self) -> Sequence[RankHandle]:
        """Return the run's rank in the trainer of all runs."""
        return [ConnectedRank(0, socket.gethostname(), self._trainer)]
