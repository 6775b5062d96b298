"""Admission of samples to generation: a limit on how many are generated at a time, and refills in groups.

An engine computes new prompts before it continues decoding, so a request after every finished one interrupts all others for one prompt.
Samples that wait are therefore admitted together once a share of the turns is free.
"""

import asyncio
from collections import deque
from types import TracebackType

REFILL_SHARE = 1 / 16
"""Share of the turns that must be free before waiting samples get them; half of it is idle on average."""


class Turns:
    """Turns of the samples in generation, as an async context manager for one sample; first come, first served.

    Args:
        limit: samples generated at a time
    """

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._refill = max(1, int(limit * REFILL_SHARE))
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._num_free and not self._waiting:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it got its turn at the same moment
                self._give_back()
            else:
                self._waiting.remove(turn)
                self._admit()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._num_free += 1
        self._admit()

    def _admit(self) -> None:
        """Admit waiting samples if enough turns are free for a refill, or for all of them."""
        if self._num_free < min(self._refill, len(self._waiting)):
            return
        while self._num_free and self._waiting:
            self._num_free -= 1
            self._waiting.popleft().set_result(None)
