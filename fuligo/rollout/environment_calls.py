"""Calls of an environment, which may raise, hang, exit, or be interrupted."""

import asyncio
import logging
import sys
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

from fuligo.environments.environment import describe_error
from fuligo.environments.isolation.messages import FailureError
from fuligo.quantities import count

logger = logging.getLogger(__name__)
T = TypeVar("T")
_END_S = 2.0
"""Seconds to wait until a canceled task has ended."""


class EpisodeError(Exception):
    """Raised if an episode fails; the text says why."""


class CallInterruptedError(Exception):
    """Raised if a call of an environment is interrupted because generation is being aborted."""


async def call_within(
    call: Coroutine[Any, Any, T],
    name: str,
    timeout_s: float,
    interrupted: asyncio.Future[None] | None = None,
    canceled: set[asyncio.Task[Any]] | None = None,
) -> T:
    """Await a call of the environment for at most `timeout_s` (--turn-timeout-s). A call that ignores its cancellation is abandoned.

    A canceled call stays in the set `canceled` until it has ended. Raises EpisodeError if the call raised or timed out, and
    CallInterruptedError if `interrupted` was done first.
    """
    task = _started(_outcome(call, name))
    if not task.done():
        awaited = [task] if interrupted is None else [task, interrupted]
        try:
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            _cancel(task, canceled)
            raise
    if not task.done():
        _cancel(task, canceled)
        if interrupted is not None and interrupted.done():
            raise CallInterruptedError
        raise EpisodeError(f"environment: {name} did not return within {timeout_s:g} s (--turn-timeout-s)")
    result = task.result()
    if isinstance(result, EpisodeError):
        raise result
    return result


def _started(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call and return its task.

    From Python 3.12 on, the call runs immediately until it first waits. Otherwise even a call that never waits would take one iteration
    of the event loop, which delays the next requests when thousands of episodes are answered at the same time.
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(call, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.ensure_future(call)


async def _outcome(call: Coroutine[Any, Any, T], name: str) -> T | EpisodeError:
    """Return the result of a call, or its exception as an EpisodeError: a SystemExit of the environment must not end the event loop."""
    try:
        return await call
    except asyncio.CancelledError:  # if `call_within` canceled it, nobody reads the value
        return EpisodeError(f"environment: {name} canceled itself")
    except FailureError as failure:
        return EpisodeError(f"environment: {failure}")
    except BaseException as error:
        return EpisodeError(f"environment: {name} raised {describe_error(error)}")


def _cancel(task: asyncio.Task[Any], canceled: set[asyncio.Task[Any]] | None) -> None:
    task.cancel()
    if canceled is not None:
        canceled.add(task)
        task.add_done_callback(canceled.discard)


async def abandon(canceled: Collection[asyncio.Task[Any]], what: str, flag: str) -> None:
    """Wait for canceled tasks to end; abandon those that do not end in time, and log a warning with their number.

    `what` names a task in the singular, and `flag` is the flag that names the user's code.
    """
    if not canceled:
        return
    _, stubborn = await asyncio.wait(list(canceled), timeout=_END_S)
    for task in stubborn:
        asyncio._unregister_task(task)  # asyncio.run would wait for it forever
    if stubborn:
        abandoned = count(len(stubborn), what)
        logger.warning("abandoned %s that caught asyncio.CancelledError and continued; raise it again in the code of %s", abandoned, flag)
