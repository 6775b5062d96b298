"""Thread that runs all computation of a rank, so that the event loop stays free and torch sees a single caller."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol


class Compute(Protocol):
    """Thread that computes, or a share in one."""

    def submit(self, function: Callable[[], Any], /) -> Future[Any]:
        """Run the function after those that were submitted before."""
        ...

    def stop(self) -> None:
        """End the thread, or the share, when all submitted work is done."""


class ComputeThread:
    """Daemon thread that runs functions one after another.

    The threads of a `ThreadPoolExecutor` are not daemons: one that hangs in a collective whose peer is dead would keep the process from
    ending.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def stop(self) -> None:
        """End the thread when all submitted work is done."""
        self._work.put(None)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one function; in a function so that what the work refers to, such as a rollout's samples, is freed when it returns."""
        work = self._work.get()
        if work is None:
            return False
        function, future = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # raised to the caller that waits
                future.set_exception(error)
        return True
