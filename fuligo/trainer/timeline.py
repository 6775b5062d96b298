"""Timed spans of one trainer rank, which the driver writes into the run's trace."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fuligo.types import Span


class Timeline:
    """Collector of a rank's spans."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as span `name`. Synchronizes the GPU at the end, so use it only where the caller needs the results anyway."""
        start_s = time.time()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._spans.append(Span(name, start_s, time.time()))

    def take(self) -> list[Span]:
        """Return and clear the recorded spans, in the order in which they ended."""
        taken, self._spans = self._spans, []
        return taken
