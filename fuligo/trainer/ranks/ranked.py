"""A trainer whose every command is the same method of all its ranks' workers, wherever the ranks are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from fuligo.errors import EngineError
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.types import FloatArray, StepResult, TrainBatch, TrainSample
from fuligo.weights.manifest import Undelivered, WeightManifest, WeightTarget


class RankedTrainer(ABC):
    """Implements `trainer.protocol.Trainer` but for how ranks begin, are called, save beside training, and end."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self.num_updates = 0

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        settings = self._settings
        if not samples or not (settings.needs_old_logprobs or settings.reference_weights):
            return samples
        return await self._call("score", samples)

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        return await self._call("logprobs", samples)

    async def train(self, batch: TrainBatch) -> StepResult:
        self.num_updates += 1
        return await self._call("train", batch)

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        sent: WeightManifest | Undelivered = await self._call("send_weights", target)
        if isinstance(sent, Undelivered):
            raise EngineError(sent.reason)
        return sent

    async def save(self, directory: Path) -> None:
        await self._call("save", for_ranks(directory))

    async def restore(self, directory: Path) -> None:
        await self._call("restore", for_ranks(directory))

    async def offload(self) -> None:
        await self._call("offload")

    async def onload(self) -> None:
        await self._call("onload")

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """The method of that name of every rank's `RankWorker`; rank 0's result.

        Raises:
            TrainerError: a rank was lost, failed, or did not finish in time; names the rank and the method.
            FuligoError: rank 0's own.
        """


def for_ranks(directory: Path) -> Path:
    """The same directory for processes that have another working directory."""
    return directory.absolute()
