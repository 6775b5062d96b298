"""What the loop asks of a trainer, whichever backend and however many ranks stand behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fuligo.formats.weight_manifest import WeightManifest, WeightTarget
from fuligo.types import FloatArray, StepResult, TrainBatch, TrainSample


class Trainer(Protocol):
    """Every method is a coroutine that returns when all ranks are done; none blocks the event loop meanwhile."""

    @property
    def num_updates(self) -> int:
        """Calls of `train` begun so far: the weights are others after each."""
        ...

    async def load(self) -> None:
        """Build the policy, with reference, teacher and value model where they are needed, and optimizers; load the first weights."""
        ...

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        """Fill in old, reference and teacher log-probabilities and values, each only where needed; the same samples in the same order."""
        ...

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        """[R] of each sample's response tokens, by the policy as it is now, at the temperature of the rollouts."""
        ...

    async def train(self, batch: TrainBatch) -> StepResult:
        """One optimizer step for every entry of `batch.steps`."""
        ...

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        """Hand the current weights, in Hugging Face names, to `target`; returns what was sent.

        Raises:
            EngineError: an engine did not take them; they can be sent again.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write weights (as a Hugging Face directory), optimizer, schedule and random state of every rank below `directory`."""
        ...

    async def begin_save(self, directory: Path) -> None:
        """As `save`, of a copy that is made first: returns when training may go on, and the writing goes on beside it. One at a time."""
        ...

    async def end_save(self) -> None:
        """Return when everything that `begin_save` began to write is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        ...

    async def restore(self, directory: Path) -> None:
        """The inverse of `save`.

        Raises:
            CheckpointError: it is incomplete or belongs to another architecture.
        """
        ...

    async def offload(self) -> None:
        """Free the device for the engine where both share it."""
        ...

    async def onload(self) -> None:
        """Undo `offload`."""
        ...

    async def close(self) -> None:
        """End the ranks."""
        ...
