"""Executor of a rank's commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from fuligo.trainer.ranks.commands import Answer, Command, R
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.rank import Rank


class RankExecutor:
    """Thread that runs a rank's commands one after another, so that the process answers pings meanwhile."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._compute = ComputeThread(f"trainer-rank-{rank.number}")

    def answer(self, command: Callable[[], Command[R]], *, is_queued: bool) -> Future[Answer[R]]:
        """Run a command.

        Args:
            command: returns it; called in the thread that runs it, since unpickling may import torch and take seconds.
            is_queued: as `Command.is_queued`.
        """
        if is_queued:
            return self._compute.submit(lambda: self._run(command))
        answered: Future[Answer[R]] = Future()
        answered.set_running_or_notify_cancel()
        threading.Thread(target=lambda: answered.set_result(self._run(command)), daemon=True).start()
        return answered

    def stop(self) -> None:
        """End the compute thread after the commands that are queued, and close the rendezvous store."""
        self._compute.stop()
        self.rank.close_store()

    def _run(self, command: Callable[[], Command[R]]) -> Answer[R]:
        try:
            return Answer(command().run(self.rank))
        except BaseException as error:
            return Answer(error=error)
