"""Base class of the backends' critics: the phase in which only the critic is trained, and its start from a checkpoint."""

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import no_value_model
from fuligo.trainer.ranks.settings import CriticSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients
from fuligo.types import FloatArray

logger = logging.getLogger(__name__)


class BaseCritic(ABC):
    """Base class of all backends' critics, which are trained to predict the returns of the policy's samples."""

    learner: Any
    """The backend's `Learner` of the value model."""

    def __init__(self, settings: CriticSettings, world: World) -> None:
        self.settings = settings
        self._world = world

    @abstractmethod
    def values(self, share: ScoreShare) -> dict[int, FloatArray]:
        """Return [R] values by position in the whole list of samples; empty except on the rank that reports for its replica."""

    @abstractmethod
    def gradients(self, step: StepShare) -> StepGradients | None:
        """Compute the gradients of the step's value loss; return None except on the rank that reports for its replica."""

    def step(self, gradients: StepGradients | None, num_micro_batches: int) -> dict[str, float]:
        """Call `Learner.step` and return the learning rate and gradient norm under the critic's metric names."""
        lr, grad_norm = self.learner.step(gradients, num_micro_batches)
        return {"critic_lr": lr, "critic_grad_norm": grad_norm}

    @property
    def learns_alone(self) -> bool:
        """True in the first `num_only_rollouts` rollouts after the value model was started, in which only it is trained."""
        return self.learner.progress.num_rollouts < self.settings.num_only_rollouts

    def end_rollout(self) -> None:
        """Count a rollout whose optimizer steps are done."""
        self.learner.progress.num_rollouts += 1

    def begin_at(self, checkpoint: Path) -> None:
        """Keep the initial value model when the run resumes from a checkpoint without one.

        Raises CheckpointError if the settings do not allow it.
        """
        if not self.settings.may_begin_at_resume:
            raise CheckpointError(no_value_model(checkpoint))
        if self._world.rank == 0:
            logger.info("%s has no value model; starting one from %s", checkpoint, self.settings.initial_weights)
