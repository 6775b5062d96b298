"""Custom rewards: a user's function, async or not, with a timeout that holds even if the function ignores cancellation."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fuligo.config.hooks import describe_exception, is_async
from fuligo.environments.threads import call_in_thread
from fuligo.errors import RewardError
from fuligo.types import Sample

_MAX_THREADS = 64
"""Maximum number of synchronous rewards that run at the same time; abandoned ones do not count."""


class CustomReward:
    """Reward by a user's function of `(args, sample)` or, for group rewards, `(args, samples)`.

    An async function runs on the event loop, any other in a thread.
    """

    def __init__(self, function: Callable[..., Any], args: Any, timeout_s: float) -> None:
        """Wrap a function. `args` is the read-only view of all flags, `timeout_s` the seconds per call."""
        self._function = function
        self._args = args
        self._timeout_s = timeout_s
        self._is_async = is_async(function)
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self.name = getattr(function, "__qualname__", type(function).__qualname__)

    async def __call__(self, samples: Sample | list[Sample]) -> Any:
        """Call the function and return its result. Raises RewardError if it raised, or did not return within the timeout."""
        if self._is_async:
            return await self._within_deadline(self._call_async(samples))
        async with self._threads:
            result = await self._within_deadline(call_in_thread(partial(self._function, self._args, samples), "custom-reward"))
        # A function that only wraps an async one returns its coroutine.
        return await self._within_deadline(result) if inspect.isawaitable(result) else result

    async def _call_async(self, samples: Sample | list[Sample]) -> Any:
        return await self._function(self._args, samples)

    async def _within_deadline(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(self._with_exceptions_as_failures(work))
        try:
            # Not asyncio.timeout: it waits for the work to end, and the user's code may swallow the cancellation.
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise RewardError(f"{self.name} gave no reward within {self._timeout_s:g} s (--rm-timeout-s)")
        return task.result()

    async def _with_exceptions_as_failures(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RewardError(f"{self.name} canceled itself") from error
        except (Exception, SystemExit) as error:
            raise RewardError(f"{self.name} raised {describe_exception(error, self._function)}") from error
