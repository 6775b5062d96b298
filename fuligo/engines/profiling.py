"""Profiles of the engines while they sample chosen rollouts, written by the engines' profilers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError

logger = logging.getLogger(__name__)

LONGEST_S = 10.0
"""Seconds after which profiling ends, although the rollout goes on: a trace of minutes is too large to open."""


@dataclass(slots=True, frozen=True)
class EngineProfiler:
    """Profiler of the engines in chosen rollouts."""

    engines: EngineGroup
    rollouts: tuple[int, ...]
    directory: Path
    """Directory on the engine's machine to which the traces (`rollout_000002_engine0-...`) are written."""

    @asynccontextmanager
    async def profiled(self, rollout: int) -> AsyncIterator[None]:
        """Profile the first `LONGEST_S` seconds of the block if `rollout` was chosen. An engine's failure to profile is only logged."""
        if rollout not in self.rollouts:
            yield
            return
        started = [engine for engine in await asyncio.gather(*map(partial(self._start, rollout), count(), self.engines.clients)) if engine]
        over = asyncio.Event()
        stopping = asyncio.create_task(self._stop(started, over))
        try:
            yield
        finally:
            over.set()
            await stopping
            if started:
                logger.info("wrote the engines' profile of rollout %d: %s/rollout_%06d_engine*", rollout, self.directory, rollout)

    async def _start(self, rollout: int, number: int, engine: InferenceEngine) -> InferenceEngine | None:
        try:
            await engine.start_profile(str(self.directory), f"rollout_{rollout:06d}_engine{number}")
        except EngineError as error:
            logger.warning("cannot profile rollout %d on engine %d: %s", rollout, number, error)
            return None
        return engine

    async def _stop(self, engines: list[InferenceEngine], over: asyncio.Event) -> None:
        """Stop the profilers when the block is over, or after `LONGEST_S`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), LONGEST_S)
        for result in await asyncio.gather(*(engine.stop_profile() for engine in engines), return_exceptions=True):
            if isinstance(result, EngineError):
                logger.warning("cannot stop an engine's profiler: %s", result)
