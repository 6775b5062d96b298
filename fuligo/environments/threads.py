"""Calls of blocking functions in separate threads, so that a hanging call delays neither other calls nor the end of the run."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class NoThreadError(RuntimeError):
    """Raised if a thread cannot be started because there are too many (ulimit -u)."""


async def call_in_thread(function: Callable[[], Any], name: str) -> Any:
    """Call a function in a new daemon thread and return its result. Raises NoThreadError if no thread can be started.

    Unlike with `asyncio.to_thread`, a call that never returns occupies no thread of a shared pool, and the interpreter does not wait for
    it at exit. StopIteration, which a future cannot hold, becomes RuntimeError.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def set_outcome(result: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result(result) if error is None else outcome.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:
            error = RuntimeError(f"{type(raised).__name__}: {raised}") if isinstance(raised, StopIteration) else raised
        with suppress(RuntimeError):  # the loop is closed, so nothing waits for the result
            loop.call_soon_threadsafe(set_outcome, result, error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise NoThreadError(f"cannot start a thread for {name}: {error}; raise the limit of processes (ulimit -u)") from None
    return await outcome
