"""Common start of the requests of a wave, for bitwise reproducible runs.

The floating-point results of a batch depend a little on its composition, so equal tokens need equal batches. Requests reach the engine
over HTTP one after another. If the engine is paused until the whole wave has arrived, it admits requests by priority, and its schedule
depends only on the wave, not on the arrival times.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError
from fuligo.types import SampleGroup

logger = logging.getLogger(__name__)

POLL_S = 0.001
ARRIVAL_DEADLINE_S = 60.0


@asynccontextmanager
async def aligned_start(engines: EngineGroup, groups: Sequence[SampleGroup]) -> AsyncIterator[None]:
    """Pause idle engines while the body starts the groups, and until all their requests have arrived.

    Raises EngineError if the engines do not count arrivals, or do not answer.
    """
    before = await _num_arrived(engines)
    await engines.pause("in_place")
    try:
        yield
        deadline = time.monotonic() + ARRIVAL_DEADLINE_S
        while (missing := _num_unfinished(groups) - (await _num_arrived(engines) - before)) > 0:
            if time.monotonic() > deadline:
                logger.warning("%d requests did not arrive within %g s: this wave is not bitwise reproducible", missing, ARRIVAL_DEADLINE_S)
                break
            await asyncio.sleep(POLL_S)
    finally:
        await engines.resume()


def _num_unfinished(groups: Sequence[SampleGroup]) -> int:
    """Count the samples that send a request: one that needs none (no tokens left, failed) is finished by now."""
    return sum(not sample.finished for group in groups for sample in group.samples)


async def _num_arrived(engines: EngineGroup) -> int:
    count = (await engines.load()).num_arrived
    if count is None:
        raise EngineError("cannot align the start of a wave: the engine does not count arriving requests; use the embedded engine")
    return count
