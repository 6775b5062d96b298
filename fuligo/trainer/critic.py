"""A value model's place in a run, whichever backend trains it: for how long it learns alone, and what it begins with."""

from __future__ import annotations

import logging
from pathlib import Path

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import no_value_model
from fuligo.trainer.ranks.settings import CriticSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress

logger = logging.getLogger(__name__)


class BaseCritic:
    """What the critics of all backends have in common.

    Args:
        progress: the value model's, which its learner moves on.
    """

    def __init__(self, settings: CriticSettings, progress: Progress, world: World) -> None:
        self.settings = settings
        self._progress = progress
        self._world = world

    @property
    def learns_alone(self) -> bool:
        """The policy does not learn from this rollout. They are counted from where the value model began, which may be at a resume."""
        return self._progress.num_rollouts < self.settings.num_only_rollouts

    def end_rollout(self) -> None:
        """All optimizer steps of a rollout are done."""
        self._progress.num_rollouts += 1

    def begin_at(self, checkpoint: Path) -> None:
        """The run goes on from a checkpoint that has no value model: it stays as it is.

        Raises:
            CheckpointError: nobody has said that one is to begin there.
        """
        if not self.settings.may_begin_at_resume:
            raise CheckpointError(no_value_model(checkpoint))
        if self._world.rank == 0:
            logger.info("%s has no value model: it begins with %s", checkpoint, self.settings.initial_weights)
