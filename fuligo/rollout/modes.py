"""When rollouts are sampled: each when it is asked for, one ahead of the training, or all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Literal

from fuligo.rollout.metrics import staleness_metrics
from fuligo.rollout.protocol import Rollout


class PacedRollouts:
    """Rollouts `start` to `stop - 1` in order.

    sync: rollout k is sampled when the loop asks for it, with the weights of that moment.
    one-step: rollout k + 1 is begun before rollout k is handed out, so that sampling and training overlap; its tokens are of weights
    one training step older than in sync mode. Whoever changes weights awaits `settle()` first. `Rollout.state` of k was taken before
    k + 1 began: a resume from it samples k + 1 again, and nothing of it is lost or trained on twice.

    full: `produce` takes rollouts out of a sampling that goes on by itself (`continuous.ContinuousRunner`). Weights may change at any
    time: `settle()` announces it and does not wait.

    Leave it as an async context manager, or `close()` it: a rollout that was begun ahead is cancelled.

    Args:
        produce: samples one rollout (`RolloutRunner.rollout`, or saved ones)
        start: first rollout, 0 or where a checkpoint resumes
        stop: number of rollouts of the whole run
        before_sync: told that weights are about to change
        policy_version: version of the weights, which train on what is handed out; the metrics say how old its tokens are for them
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
        """
        Raises:
            FuligoError: whatever sampling this rollout raised, also where that happened ahead of time.
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

    async def __aenter__(self) -> PacedRollouts:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def settle(self) -> None:
        """Return when weights may change: when no rollout is being sampled, or at once where sampling never stops.

        An error of the rollout is raised when it is asked for.
        """
        self._before_sync()
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def close(self) -> None:
        """Cancel the rollout that is ahead; when this returns it is gone."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
