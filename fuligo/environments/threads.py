"""Calls of plain functions in threads of their own, so that one that hangs holds up neither other calls nor the end of the run."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class NoThreadError(RuntimeError):
    """Failure to start a thread, because there are too many (ulimit -u)."""


async def call_in_thread(function: Callable[[], Any], name: str) -> Any:
    """Call a function in a daemon thread of its own and return its result.

    The threads of `asyncio.to_thread` are few and shared: functions that never return would take all of them, and the interpreter waits
    for them at its end.

    Raises:
        NoThreadError: no thread can be started
        RuntimeError: the function raised StopIteration, which a future cannot hold
        BaseException: whatever else the function raises
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
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_outcome, result, error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise NoThreadError(f"cannot start a thread for {name}: {error}; raise the limit of processes (ulimit -u)") from None
    return await outcome
