"""One run's access to the trainer and engines that several runs share."""

import asyncio
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fuligo.engines.backend import LentEngines
from fuligo.errors import EngineError
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.connected import ConnectedRank
from fuligo.trainer.ranks.handle import RankHandle


@dataclass(slots=True)
class LentParts:
    """Trainer and engines that the process of `fuligo train-many` lends to the process of one run.

    `control` receives the engines once they serve; `trainer` is connected to the run's rank. With `resume`, the run may replace recorded
    steps in its directory, even without a checkpoint.
    """

    control: Connection
    trainer: Connection
    num_runs: int
    """Runs that share the trainer and the engines."""
    resume: bool = False
    _engines: LentEngines | None = None

    async def engines(self) -> LentEngines:
        """Wait until the engines serve, and return them. Raises EngineError if the process of `fuligo train-many` has ended.

        The wait is in a daemon thread, because `asyncio.run` joins the threads of `to_thread` and an interrupted run would never end.
        """
        if self._engines is None:
            try:
                received = ComputeThread("shared engines").submit(self.control.recv_bytes)
                self._engines = pickle.loads(await asyncio.wrap_future(received))
            except (EOFError, OSError) as error:
                raise EngineError("the process that all runs share ended before its engines served; see its output") from error
        assert self._engines is not None
        return self._engines

    async def ranks(self) -> Sequence[RankHandle]:
        """Return the run's rank in the shared trainer."""
        return [ConnectedRank(0, socket.gethostname(), self.trainer)]
