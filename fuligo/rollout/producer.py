"""Production of rollouts: measurements (wall time, idle engines, engine load) and pace (on demand, one step ahead, continuous)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, Unpack

from fuligo.engines.engine import Engine
from fuligo.engines.generation import Generation, RequestOptions, SamplingParams
from fuligo.engines.metrics import EngineMonitor
from fuligo.engines.profiling import EngineProfiler
from fuligo.rollout.metrics import staleness_metrics
from fuligo.rollout.protocol import Rollout, RolloutMethod
from fuligo.types import IntArray

PhaseTimer = Callable[[str, int], AbstractContextManager[object]]
"""Timer of a phase of a step, by name and step."""


@dataclass(eq=False)
class RolloutProducer:
    """Producer that obtains rollouts from one method and adds engine measurements to their metrics."""

    method: RolloutMethod
    _: KW_ONLY
    phase: PhaseTimer
    """Timer of the phase `rollout` of a step."""
    activity: Activity | None = None
    """Counter of the requests of the rollouts; None if nothing is sampled."""
    monitor: EngineMonitor | None = None
    """Monitor of the engines' load; None: no measurements."""
    profiler: EngineProfiler | None = None
    """Profiler of the engines in chosen rollouts; None without --profile."""
    _started: bool = field(default=False, init=False)

    async def produce(self, step: int) -> Rollout:
        """Produce the rollout of `step`. Raises FuligoError if the method failed."""
        if self.activity is not None and not self._started:
            self.activity.take_idle_fraction()  # excludes the time before the first rollout
        self._started = True
        profiled = nullcontext() if self.profiler is None else self.profiler.profiled(step)
        with self.phase("rollout", step):
            async with profiled:
                rollout = await self.method.rollout(step)
        if self.monitor is not None:
            rollout.metrics |= self.monitor.take()
        if self.activity is not None:
            rollout.metrics["perf/engine_idle_fraction"] = self.activity.take_idle_fraction()
        return rollout


class Activity:
    """Clock of the time in which at least one request is in flight."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._since_s = time.perf_counter()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as in flight during the block."""
        if self._num_requests == 0:
            self._busy_since_s = time.perf_counter()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._busy_s += time.perf_counter() - self._busy_since_s

    def take_idle_fraction(self) -> float:
        """Return the share of the time since the last call in which no request was in flight."""
        now_s = time.perf_counter()
        if self._num_requests:
            self._busy_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        elapsed_s, busy_s = now_s - self._since_s, self._busy_s
        self._since_s, self._busy_s = now_s, 0.0
        return max(0.0, 1.0 - busy_s / elapsed_s) if elapsed_s > 0 else 0.0


@dataclass(eq=False)
class CountedEngine:
    """Engine whose requests are counted. Implements `Engine`."""

    engine: Engine
    activity: Activity

    async def generate(self, input_ids: IntArray, params: SamplingParams, *, rid: str, **options: Unpack[RequestOptions]) -> Generation:
        with self.activity.request():
            return await self.engine.generate(input_ids, params, rid=rid, **options)


@dataclass(eq=False)
class PacedRollouts:
    """Async iterator over the rollouts `start` to `stop - 1`.

    sync: rollout k is sampled when the loop asks for it, with the current weights.
    one-step: rollout k + 1 begins before rollout k is handed out, so that sampling and training overlap; its tokens are one training
    step older than in sync mode. Await `settle()` before the weights change. `Rollout.state` of k is taken before k + 1 begins: a
    resume samples k + 1 again, and nothing is lost or trained on twice.
    full: `produce` takes rollouts from continuous sampling (`continuous.ContinuousRunner`). Weights may change at any time:
    `settle()` announces the change and does not wait.

    `close()` cancels a rollout that began ahead.
    """

    produce: Callable[[int], Awaitable[Rollout]]
    _: KW_ONLY
    start: int
    """Next rollout; at first 0, or the step of the checkpoint."""
    stop: int
    """Number of rollouts of the whole run."""
    mode: Literal["sync", "one-step", "full"] = "sync"
    before_sync: Callable[[], None] = lambda: None
    """Function to call when the weights are about to change."""
    policy_version: Callable[[], int] | None = None
    """Version of the weights that are trained on the rollout, for staleness metrics; None if nothing is sampled."""
    end_early: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that ends the iteration and cancels the rollout that the loop waits for, also in `settle`."""
    _ahead: asyncio.Future[Rollout] | None = field(default=None, init=False)

    @property
    def all_handed_out(self) -> bool:
        return self.start == self.stop

    def __aiter__(self) -> PacedRollouts:
        return self

    async def __anext__(self) -> Rollout:
        """Return the next rollout. Raises FuligoError if this rollout failed, possibly ahead of time."""
        if self.start == self.stop or self.end_early.is_set():
            raise StopAsyncIteration
        rollout = await self._unless_ended(self._ahead or asyncio.ensure_future(self.produce(self.start)))
        self._ahead = None
        self.start += 1
        if self.policy_version is not None:
            rollout.metrics |= staleness_metrics(rollout.groups, self.policy_version())
        if self.mode == "one-step" and self.start < self.stop:
            self._ahead = asyncio.ensure_future(self.produce(self.start))
        return rollout

    async def _unless_ended(self, rollout: asyncio.Future[Rollout]) -> Rollout:
        """Wait for a rollout; cancel it if the wait is canceled. Raises StopAsyncIteration if the run was ended first."""
        ended = asyncio.ensure_future(self.end_early.wait())
        try:
            await asyncio.wait([rollout, ended], return_when=asyncio.FIRST_COMPLETED)
            if self.end_early.is_set():
                raise StopAsyncIteration
            return await rollout
        finally:
            ended.cancel()
            if not rollout.done():
                rollout.cancel()
                await asyncio.gather(rollout, return_exceptions=True)

    async def settle(self) -> None:
        """Wait until the weights may change: until no rollout is being sampled. In full mode, return immediately.

        If the rollout ahead fails, its error is raised when the loop asks for it. If the run is ended early, the rollout ahead is canceled.
        """
        self.before_sync()
        if self._ahead is None:
            return
        ended = asyncio.ensure_future(self.end_early.wait())
        try:
            await asyncio.wait([self._ahead, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self.end_early.is_set():
            await self.close()

    async def close(self) -> None:
        """Cancel the rollout that is ahead and wait until it has ended."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
