"""What a rank of the trainer can do, whichever backend computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from fuligo.formats.weight_manifest import Undelivered, WeightManifest, WeightTarget
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.packing import Cost
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import SampleScores, ScoreShare, StepShare
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.types import FloatArray, StepResult


class RankWorker(Protocol):
    """The same calls are made on all ranks, in the same order; `trainer.protocol.Trainer` says what they do.

    Samples come as the share of the rank's data-parallel replica, other arguments are the same on all ranks. Results are rank 0's, of all
    samples; other ranks return None or what they have.
    """

    balance_by: Cost | None
    """What replicas are to have about equally much of."""

    def score(self, share: ScoreShare) -> list[SampleScores] | None: ...

    def logprobs(self, share: ScoreShare) -> list[FloatArray] | None: ...

    def train(self, steps: Sequence[StepShare]) -> StepResult:
        """
        Args:
            steps: the share of each optimizer step.
        """
        ...

    def send_weights(self, target: WeightTarget) -> WeightManifest | Undelivered | None: ...

    def save(self, directory: Path) -> None: ...

    def begin_save(self, directory: Path) -> Future[None]:
        """Rank 0's is done when all ranks have written."""
        ...

    def restore(self, directory: Path) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def close(self) -> None:
        """Forget the process groups that the backend made; the default one ends after it."""
        ...


def build_worker(settings: TrainerSettings, world: World) -> RankWorker:
    """This rank's part of the model, of the backend that the settings are for. A collective.

    Raises:
        CheckpointError: weights cannot be read.
        TrainerError: the backend cannot run the model.
        ConfigError: the lists of trained parameters do not fit the model.
    """
    if isinstance(settings, MegatronTrainerSettings):
        from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

        return MegatronRankWorker(settings, world)
    assert isinstance(settings, TorchTrainerSettings)
    from fuligo.trainer.torch_backend.worker import TorchRankWorker

    return TorchRankWorker(settings, world)
