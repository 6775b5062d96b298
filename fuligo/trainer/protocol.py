"""Interface between the loop and a trainer of any backend, on any number of ranks."""

from pathlib import Path
from typing import Protocol

from fuligo.types import StepResult, TrainBatch, TrainSample
from fuligo.weights.source import WeightSource


class Trainer(WeightSource, Protocol):
    """Trainer of a policy. Every method is a coroutine that returns when all ranks are done and does not block the event loop meanwhile."""

    async def load(self) -> None:
        """Build the policy, the reference, teacher and value models that the run needs, and the optimizers; load the initial weights."""

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        """Return the samples, in order, with the log-probabilities, values and recorded experts that training needs."""
        ...

    async def train(self, batch: TrainBatch) -> StepResult:
        """Take one optimizer step for every entry of `batch.steps`; return metrics, and the scores of the trained samples.

        Raises TrainerError if a loss or gradient is not finite.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write a checkpoint below `directory`: weights, optimizer, counters, and the random state of every rank."""

    async def begin_save(self, directory: Path) -> None:
        """Copy the state that `save` writes, and write the copy in the background while training continues. Only one save at a time."""

    async def end_save(self) -> None:
        """Wait until everything from `begin_save` is on disk. Raises CheckpointError if it could not be written."""

    async def restore(self, directory: Path) -> None:
        """Load a checkpoint that `save` wrote. Raises CheckpointError if it is incomplete or belongs to another architecture."""

    async def offload(self) -> None:
        """Free device memory for engines that share the device; without --no-offload-train, weights and optimizer too."""

    async def onload(self) -> None:
        """Restore what `offload` freed."""

    async def close(self) -> None:
        """Stop all ranks."""
