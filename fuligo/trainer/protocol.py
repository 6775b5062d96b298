"""Trainer as the loop sees it, whichever backend computes and however many ranks there are."""

from pathlib import Path
from typing import Protocol

from fuligo.types import StepResult, TrainBatch, TrainSample
from fuligo.weights.source import WeightSource


class Trainer(WeightSource, Protocol):
    """Trainer of a policy. Every method is a coroutine that returns when all ranks are done, and leaves the event loop free meanwhile."""

    async def load(self) -> None:
        """Build the policy, the reference, teacher and value model where they are needed, and optimizers; load the initial weights."""

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        """Fill in old, reference and teacher log-probabilities and values where needed; return the samples in the same order."""
        ...

    async def train(self, batch: TrainBatch) -> StepResult:
        """Take one optimizer step for every entry of `batch.steps`."""
        ...

    async def save(self, directory: Path) -> None:
        """Write weights (as a Hugging Face directory), optimizer, schedule and random state of every rank below `directory`."""

    async def begin_save(self, directory: Path) -> None:
        """Copy what `save` would write, return, and write the copy while training continues. One save at a time."""

    async def end_save(self) -> None:
        """Return when everything that `begin_save` began to write is on disk. Raises CheckpointError if it could not be written."""

    async def restore(self, directory: Path) -> None:
        """Load what `save` wrote. Raises CheckpointError if it is incomplete or belongs to another architecture."""

    async def offload(self) -> None:
        """Free the device for the engines where both share it."""

    async def onload(self) -> None:
        """Undo `offload`."""

    async def close(self) -> None:
        """End the ranks."""
