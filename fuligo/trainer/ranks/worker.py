"""Worker of a trainer rank, the same for every backend."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from fuligo.formats.weight_manifest import Undelivered, WeightManifest, WeightTarget
from fuligo.limits import collector_paused
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.packing import Cost
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import SampleScores, ScoreShare, StepShare
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.types import FloatArray, StepResult


class RankWorker(Protocol):
    """This rank's part of the models. The methods are those of `trainer.protocol.Trainer`, called on all ranks in the same order.

    Samples come as the share of the rank's data-parallel replica; other arguments are the same on all ranks. Rank 0 returns the result for
    all samples; other ranks return None or their part.
    """

    balance_by: Cost | None
    """Cost that is balanced over the replicas."""

    def score(self, share: ScoreShare) -> list[SampleScores] | None: ...

    def logprobs(self, share: ScoreShare) -> list[FloatArray] | None: ...

    def train(self, steps: Sequence[StepShare | None]) -> StepResult:
        """Run the optimizer steps of a rollout. `steps`: the replica's share of each optimizer step; None for one that is skipped."""
        ...

    def send_weights(self, target: WeightTarget) -> WeightManifest | Undelivered | None: ...

    def save(self, directory: Path) -> None: ...

    def begin_save(self, directory: Path) -> Future[None]:
        """Return a future; rank 0's is done when all ranks have written."""
        ...

    def restore(self, directory: Path) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def close(self) -> None:
        """Release the process groups that the backend made; the default one is destroyed afterwards."""


def build_worker(settings: TrainerSettings, world: World) -> RankWorker:
    """Build this rank's part of the model with the settings' backend. A collective.

    Raises CheckpointError if weights cannot be read, TrainerError if the backend cannot run the model, and ConfigError if the lists of
    trained parameters do not fit the model.
    """
    return import_worker(settings)(settings, world)


def import_worker(settings: TrainerSettings) -> Callable[[Any, World], RankWorker]:
    """Import the settings' backend and return its worker's class."""
    if isinstance(settings, MegatronTrainerSettings):
        with collector_paused():
            from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

        return MegatronRankWorker
    assert isinstance(settings, TorchTrainerSettings)
    with collector_paused():
        from fuligo.trainer.torch_backend.worker import TorchRankWorker

    return TorchRankWorker
