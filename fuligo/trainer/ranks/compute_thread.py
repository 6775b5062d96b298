"""Thread that runs all computation of a rank, so that the event loop is not blocked and torch is called from a single thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol


class Compute(Protocol):
    """Compute thread, or one run's share of a compute thread."""

    def submit(self, function: Callable[[], Any], /) -> Future[Any]:
        """Run the function after all functions submitted before it; return the future of its result."""
        ...

    def stop(self) -> None:
        """Stop the thread, or give up the share, when all submitted work is done."""


class ComputeThread:
    """Daemon thread that runs functions one after another.

    The threads of a `ThreadPoolExecutor` are not daemons: if one hung in a collective because a peer has died, the process could not exit.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def stop(self) -> None:
        """Stop the thread when all submitted work is done."""
        self._work.put(None)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one function. A separate method, so that its references, for example to a rollout's samples, are dropped when it returns."""
        work = self._work.get()
        if work is None:
            return False
        function, future = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # raised again in the waiting caller
                future.set_exception(error)
        return True
