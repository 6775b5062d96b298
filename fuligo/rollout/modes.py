"""Pace of the rollouts: each when the loop asks for it, one ahead of the training, or without pause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from fuligo.rollout.metrics import staleness_metrics
from fuligo.rollout.protocol import Rollout


class PacedRollouts:
    """Async iterator over the rollouts `start` to `stop - 1`.

    sync: rollout k is sampled when the loop asks for it, with the weights of that moment.
    one-step: rollout k + 1 begins before rollout k is handed out, so that sampling and training overlap; its tokens are one training
    step older than in sync mode. Await `settle()` before the weights change. `Rollout.state` of k is taken before k + 1 begins: a
    resume samples k + 1 again, and nothing is lost or trained on twice.
    full: `produce` takes rollouts out of sampling that never stops (`continuous.ContinuousRunner`). Weights may change at any time:
    `settle()` announces the change and does not wait.

    `close()` cancels a rollout that began ahead.

    Args:
        produce: produces the rollout of a step
        start: first rollout; 0, or the step of the checkpoint
        stop: number of rollouts of the whole run
        before_sync: called when the weights are about to change
        policy_version: version of the weights that train on what is handed out, for the staleness metrics; None if nothing is sampled
    """

    def __init__(
        self,
        produce: Callable[[int], Awaitable[Rollout]],
        *,
        start: int,
        stop: int,
        mode: Literal["sync", "one-step", "full"] = "sync",
        before_sync: Callable[[], None] = lambda: None,
        policy_version: Callable[[], int] | None = None,
    ) -> None:
        self._produce = produce
        self._next = start
        self._stop = stop
        self._one_ahead = mode == "one-step"
        self._before_sync = before_sync
        self._policy_version = policy_version
        self._ahead: asyncio.Future[Rollout] | None = None

    def __aiter__(self) -> PacedRollouts:
        return self

    async def __anext__(self) -> Rollout:
        """Return the next rollout.

        Raises:
            FuligoError: this rollout failed, possibly ahead of time
        """
        if self._next == self._stop:
            raise StopAsyncIteration
        step = self._next
        rollout = await (self._produce(step) if self._ahead is None else self._ahead)
        self._ahead = None
        self._next = step + 1
        if self._policy_version is not None:
            rollout.metrics |= staleness_metrics(rollout.groups, self._policy_version())
        if self._one_ahead and self._next < self._stop:
            self._ahead = asyncio.ensure_future(self._produce(self._next))
        return rollout

    async def settle(self) -> None:
        """Return when the weights may change: when no rollout is being sampled, or at once in full mode.

        If the rollout ahead fails, its error is raised when the loop asks for it.
        """
        self._before_sync()
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def close(self) -> None:
        """Cancel the rollout that is ahead and wait until it has ended."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
