"""Production of the rollout of a step, with its measurements: wall time, idle engines, engine load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from fuligo.engines.generation import Generation, RoutingQuery, SamplingParams
from fuligo.engines.metrics import EngineMonitor
from fuligo.rollout.generate import Engine
from fuligo.rollout.protocol import Rollout, RolloutMethod
from fuligo.types import IntArray

PhaseTimer = Callable[[str, int], AbstractContextManager[object]]
"""Times a phase of a step, by name and step."""


class RolloutProducer:
    """Produces the rollout of a step by one method and measures it.

    Args:
        method: makes the rollout
        phase: times it as the phase `rollout` of the step
        activity: counts the requests of the rollouts; None if nothing is sampled
        monitor: polls the engines; None without engines
    """

    def __init__(
        self, method: RolloutMethod, *, phase: PhaseTimer, activity: Activity | None = None, monitor: EngineMonitor | None = None
    ) -> None:
        self._method = method
        self._phase = phase
        self._activity = activity
        self._monitor = monitor
        self._started = False

    async def produce(self, step: int) -> Rollout:
        """Produce the rollout of `step`.

        Raises:
            FuligoError: the method's error
        """
        if self._activity is not None and not self._started:
            self._activity.take_idle_fraction()  # excludes the time before the first rollout
        self._started = True
        with self._phase("rollout", step):
            rollout = await self._method.rollout(step)
        if self._monitor is not None:
            rollout.metrics |= self._monitor.take()
        if self._activity is not None:
            rollout.metrics["perf/engine_idle_fraction"] = self._activity.take_idle_fraction()
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


class CountedEngine:
    """Engine whose requests are counted. Implements `generate.Engine`."""

    def __init__(self, engine: Engine, activity: Activity) -> None:
        self._engine = engine
        self._activity = activity

    async def generate(
        self,
        input_ids: IntArray,
        params: SamplingParams,
        *,
        rid: str,
        priority: int = 0,
        timeout_s: float | None = None,
        routing: RoutingQuery | None = None,
    ) -> Generation:
        with self._activity.request():
            return await self._engine.generate(input_ids, params, rid=rid, priority=priority, timeout_s=timeout_s, routing=routing)
