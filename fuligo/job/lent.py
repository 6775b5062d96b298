"""Trainer and engine that several runs share, as one of them uses them."""

import asyncio
import pickle
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection

from fuligo.engines.backend import LentEngines
from fuligo.errors import EngineError
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.connected import ConnectedRank
from fuligo.trainer.ranks.handle import RankHandle


class LentParts:
    """Parts that the process of all runs lends to the process of one.

    Args:
        control: connection over which the engines arrive once they serve
        trainer: connection to the run's rank
        num_runs: runs that share them
        resume: the run may replace the steps that it has recorded, though it has no checkpoint
    """

    def __init__(self, control: Connection, trainer: Connection, num_runs: int, *, resume: bool = False) -> None:
        self.num_runs = num_runs
        self.resume = resume
        self._control = control
        self._trainer = trainer
        self._engines: LentEngines | None = None

    async def engines(self) -> LentEngines:
        """Return the engines when they serve.

        They are awaited in a daemon thread: asyncio waits at its end for the threads of `to_thread`, and an interrupted run would not end.
        Raises EngineError if the process of all runs has ended.
        """
        if self._engines is None:
            try:
                received = ComputeThread("shared engines").submit(self._control.recv_bytes)
                self._engines = pickle.loads(await asyncio.wrap_future(received))
            except (EOFError, OSError) as error:
                raise EngineError("the process that all runs share ended before its engines served; see its output") from error
        assert self._engines is not None
        return self._engines

    async def ranks(self) -> Sequence[RankHandle]:
        """Return the run's rank in the trainer of all runs."""
        return [ConnectedRank(0, socket.gethostname(), self._trainer)]
