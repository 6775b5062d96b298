"""Thread that runs all computation of a rank, so that the event loop is not blocked and torch is called from a single thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

Work = tuple[Callable[[], Any], Future[Any]]
"""Function to run, and the future of its result."""


class Compute(Protocol):
    """Thread, or one run's share of a thread, that runs functions one after another."""

    def submit(self, function: Callable[[], Any]) -> Future[Any]: ...

    def stop(self) -> None: ...


class ComputeThread:
    """Daemon thread that runs functions one after another.

    The threads of a `ThreadPoolExecutor` are not daemons: if one hung in a collective because a peer has died, the process could not exit.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        start_thread(name, self._work.get)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run the function after all functions submitted before it; return the future of its result."""
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def stop(self) -> None:
        """Stop the thread when all submitted work is done."""
        self._work.put(None)


def start_thread(name: str, next_work: Callable[[], Work | None]) -> None:
    """Start a daemon thread that runs the work that `next_work` waits for, until that returns None."""

    def run_next() -> bool:
        """Run one function. A separate function, so that its references, for example to a rollout's samples, are dropped at its end."""
        if (work := next_work()) is None:
            return False
        function, future = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # raised again in the waiting caller
                future.set_exception(error)
        return True

    def run() -> None:
        while run_next():
            pass

    threading.Thread(target=run, name=name, daemon=True).start()
