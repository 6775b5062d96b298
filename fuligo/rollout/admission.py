"""How many groups may have been begun, so that none is too old when its turn to be trained comes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Admission:
    """Bounds staleness from the front: what is not begun early is not late.

    Groups are trained in the order in which they began, `batch_size` to a rollout, and the version of the weights rises after every
    `update_interval` rollouts. A group begun at version v may therefore stand so far back in the line that its rollout is trained by
    version v + K, and no further. With an update after every rollout this is the rule of AReaL (arXiv 2505.24298, staleness-aware
    training): groups begun in all <= (version + K + 1) * batch size.
    """

    batch_size: int
    """Groups of a rollout."""
    max_staleness: int
    """K, in versions."""
    update_interval: int
    """Rollouts between weight syncs."""
    num_rollout: int
    """Of the whole run: nothing is begun for later ones."""

    def limit(self, *, next_step: int, asked: Asked, version: int) -> int:
        """Groups that may be in flight or wait to be trained.

        Args:
            next_step: the first rollout that is not handed out
            asked: when the version was last seen together with a step
            version: of the weights in the engines
        """
        last_epoch = version + self.max_staleness - asked.version + asked.step // self.update_interval
        num_steps = min(self.update_interval * (last_epoch + 1), self.num_rollout) - next_step
        return self.batch_size * max(0, num_steps)


@dataclass(slots=True, frozen=True)
class Asked:
    """The trainer asked for rollout `step` when the engines had weights of `version`: that rollout is trained by this version."""

    step: int
    version: int
