"""For how much of the time the engines had something to do, as seen from where requests are sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fuligo.engines.generation import Generation, RoutingQuery, SamplingParams
from fuligo.rollout.generate import Engine
from fuligo.types import IntArray


class Activity:
    """Adds up the time in which at least one request was under way."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._busy_s = 0.0
        self._began_s = 0.0
        self._since_s = time.perf_counter()

    @contextmanager
    def request(self) -> Iterator[None]:
        if self._num_requests == 0:
            self._began_s = time.perf_counter()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._busy_s += time.perf_counter() - self._began_s

    def take_idle_fraction(self) -> float:
        """Share of the time since the last call in which no request was under way."""
        now_s = time.perf_counter()
        if self._num_requests:
            self._busy_s += now_s - self._began_s
            self._began_s = now_s
        elapsed_s, busy_s = now_s - self._since_s, self._busy_s
        self._since_s, self._busy_s = now_s, 0.0
        return max(0.0, 1.0 - busy_s / elapsed_s) if elapsed_s > 0 else 0.0


class Observed:
    """An engine whose requests are counted."""

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
        """See `generate.Engine`."""
        with self._activity.request():
            return await self._engine.generate(input_ids, params, rid=rid, priority=priority, timeout_s=timeout_s, routing=routing)
