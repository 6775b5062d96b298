"""Calls of an environment, which may raise, hang, exit, or be interrupted."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EpisodeError(Exception):
    """Reason why an episode failed."""


class CallInterruptedError(Exception):
    """Generation is being aborted while the environment works."""


async def call_within(call: Coroutine[Any, Any, T], name: str, timeout_s: float, interrupted: asyncio.Future[None] | None = None) -> T:
    """Await a call of the environment for at most `timeout_s` (--turn-timeout-s). A call that ignores its cancellation is abandoned.

    Raises EpisodeError if it raised, or took longer, and CallInterruptedError if `interrupted` was done first.
    """
    task = _started(_outcome(call, name))
    if not task.done():
        awaited = [task] if interrupted is None else [task, interrupted]
        try:
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
    if not task.done():
        task.cancel()
        if interrupted is not None and interrupted.done():
            raise CallInterruptedError
        raise EpisodeError(f"environment: {name} did not return within {timeout_s:g} s (--turn-timeout-s)")
    result = task.result()
    if isinstance(result, EpisodeError):
        raise result
    return result


def _started(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call and return its task.

    From Python 3.12 on, the call runs at once until it first waits. Otherwise a call that never waits would take a pass of the event
    loop, which delays the next requests of thousands of episodes that are answered at once.
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(call, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.ensure_future(call)


async def _outcome(call: Coroutine[Any, Any, T], name: str) -> T | EpisodeError:
    """Return the result of a call, or its error as a value: an exit of the environment must not end the event loop."""
    try:
        return await call
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        return EpisodeError(f"environment: {name} canceled itself")
    except (Exception, SystemExit) as error:
        return EpisodeError(f"environment: {name} raised {type(error).__name__}: {error}")
