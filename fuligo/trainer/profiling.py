"""Timed spans of a trainer rank, and PyTorch profiler traces and memory snapshots of selected rollouts and ranks."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fuligo.types import Span

logger = logging.getLogger(__name__)

_MAX_MEMORY_EVENTS = 1_000_000
"""Number of the latest allocation events that a memory snapshot holds."""


class Timeline:
    """Collector of a rank's spans, which the driver writes into the run's trace."""

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


@dataclass(slots=True, frozen=True)
class ProfileSettings:
    """Rollouts and ranks to profile, and the output directory."""

    rollouts: tuple[int, ...]
    ranks: tuple[int, ...]
    directory: Path
    """Output directory, for files such as `rollout_000002_rank0.trace.json.gz` and, on a GPU, `rollout_000002_rank0.memory.pickle`."""


@contextmanager
def profiled(settings: ProfileSettings | None, *, rollout: int, rank: int, device: torch.device) -> Iterator[None]:
    """Profile the block and write the results to the settings' directory, if the settings select this rollout and rank."""
    if settings is None or rollout not in settings.rollouts or rank not in settings.ranks:
        yield
        return
    on_gpu = device.type == "cuda"
    settings.directory.mkdir(parents=True, exist_ok=True)
    name = str(settings.directory / f"rollout_{rollout:06d}_rank{rank}")
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
    try:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
            yield
        profiler.export_chrome_trace(f"{name}.trace.json.gz")
        if on_gpu:
            torch.cuda.memory._dump_snapshot(f"{name}.memory.pickle")
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
    logger.info("wrote the profile of rollout %d to %s.*", rollout, name)
