"""REINFORCE++ with a group baseline: Hu 2025, arXiv:2501.03262.

A_t = r - mean of the group - kl_coef times the KL of token t, then whitened over all tokens of the rollout.
Loss: PPO's clipped token ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimator import Estimator
from fuligo.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from fuligo.algorithms.rewards import Float64Array, Rewards


class ReinforcePlusPlusBaseline(Estimator):
    """Group mean as baseline, the rollout's standard deviation as scale."""

    has_group_baseline = True
    uses_kl_coef = True
    needs_whitening = True

    def advantages(self, rewards: Rewards, settings: AdvantageSettings) -> list[Float64Array]:
        r = rewards.values
        centred = rewards.per_token(r - rewards.group_mean(r) if settings.normalize_rewards else r)
        return [values - penalty for values, penalty in zip(centred, rewards.kl_penalties(settings))]


ESTIMATOR = ReinforcePlusPlusBaseline()
