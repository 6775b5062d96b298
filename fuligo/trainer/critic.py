"""Critic parts that all backends share: the phase in which only the critic learns, and its start from a checkpoint."""

import logging
from pathlib import Path

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import no_value_model
from fuligo.trainer.ranks.settings import CriticSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress

logger = logging.getLogger(__name__)


class BaseCritic:
    """Base class of all backends' critics; its learner advances `progress`, the value model's counters."""

    def __init__(self, settings: CriticSettings, progress: Progress, world: World) -> None:
        self.settings = settings
        self._progress = progress
        self._world = world

    @property
    def learns_alone(self) -> bool:
        """True while only the value model learns. Rollouts count from where it began, which may be at a resume."""
        return self._progress.num_rollouts < self.settings.num_only_rollouts

    def end_rollout(self) -> None:
        """Count a rollout whose optimizer steps are done."""
        self._progress.num_rollouts += 1

    def begin_at(self, checkpoint: Path) -> None:
        """Keep the value model as it is when the run resumes from a checkpoint without one.

        Raises CheckpointError if the settings do not allow it.
        """
        if not self.settings.may_begin_at_resume:
            raise CheckpointError(no_value_model(checkpoint))
        if self._world.rank == 0:
            logger.info("%s has no value model; starting one from %s", checkpoint, self.settings.initial_weights)
