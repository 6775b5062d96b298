"""A trainer whose every command is the same method of all its ranks' workers, wherever the ranks are.

Samples are planned for here, so that each data-parallel replica is sent its own and no others.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fuligo.errors import EngineError
from fuligo.formats.weight_manifest import Undelivered, WeightManifest, WeightTarget
from fuligo.trainer.packing import Cost
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.shares import SampleScores, score_shares, step_shares
from fuligo.trainer.value_objective import value_metrics
from fuligo.types import FloatArray, StepResult, TrainBatch, TrainSample

T = TypeVar("T")
S = TypeVar("S")


class RankedTrainer(ABC):
    """Implements `trainer.protocol.Trainer` but for how ranks begin, are called, save beside training, and end."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._balance_by: Cost | None = None
        """As the ranks say when they are loaded."""
        self.num_updates = 0

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        if not samples or not self._settings.scores:
            return samples
        scores: list[SampleScores] = await self._call_with_shares("score", await self._planned(score_shares, samples))
        return [of_sample.filled_into(sample) for of_sample, sample in zip(scores, samples, strict=True)]

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        return await self._call_with_shares("logprobs", await self._planned(score_shares, samples))

    async def train(self, batch: TrainBatch) -> StepResult:
        self.num_updates += 1
        result: StepResult = await self._call_with_shares("train", await self._planned(step_shares, batch))
        return replace(result, metrics=result.metrics | value_metrics(batch.samples))

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

    async def _planned(self, shares: Callable[[T, TrainerSettings, Cost | None], Sequence[S]], of: T) -> Sequence[S]:
        """Every replica's share. In a thread: packing 8192 samples takes over a second, and rollouts go on meanwhile."""
        return await asyncio.to_thread(shares, of, self._settings, self._balance_by)

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """The method of that name of every rank's `RankWorker`; rank 0's result.

        Raises:
            TrainerError: a rank was lost, failed, or did not finish in time; names the rank and the method.
            FuligoError: rank 0's own.
        """

    @abstractmethod
    async def _call_with_shares(self, method: str, shares: Sequence[Any]) -> Any:
        """As `_call`, for a method with one argument, which is the share of the rank's replica.

        Args:
            shares: by replica.
        """


def for_ranks(directory: Path) -> Path:
    """The same directory for processes that have another working directory."""
    return directory.absolute()
