"""Executor of the commands of one rank, in the rank's process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from fuligo.trainer.ranks.commands import Answer, Command, R
from fuligo.trainer.ranks.compute_thread import Compute, ComputeThread
from fuligo.trainer.ranks.rank import Rank


class RankExecutor:
    """Executor of a rank's commands: queued ones run one after another in a compute thread, others, such as pings, at once.

    Args:
        compute: thread of the queued commands; None: a new one.
    """

    def __init__(self, rank: Rank, compute: Compute | None = None) -> None:
        self.rank = rank
        self._compute = ComputeThread(f"trainer-rank-{rank.number}") if compute is None else compute

    def answer(self, command: Callable[[], Command[R]], *, is_queued: bool) -> Future[Answer[R]]:
        """Run a command and return the future of its answer.

        Args:
            command: function that returns the command; called in the thread that runs it, because unpickling may import torch and take
                seconds.
            is_queued: as `Command.is_queued`.
        """
        if is_queued:
            return self._compute.submit(lambda: self._run(command))
        answered: Future[Answer[R]] = Future()
        answered.set_running_or_notify_cancel()
        threading.Thread(target=lambda: answered.set_result(self._run(command)), daemon=True).start()
        return answered

    def stop(self) -> None:
        """Stop the compute thread after the queued commands, and close the rendezvous store."""
        self._compute.stop()
        self.rank.close_store()

    def _run(self, command: Callable[[], Command[R]]) -> Answer[R]:
        try:
            return Answer(command().run(self.rank))
        except BaseException as error:
            return Answer(error=error)
