"""REINFORCE leave-one-out (RLOO): Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740.

A = r - mean of the group's other responses, the same for all tokens of a response. r is the reward minus kl_coef times the sum of the KL
over the response's trained tokens. The baseline does not depend on the response itself, which keeps the policy gradient unbiased.
Loss: PPO's clipped token ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimator import Estimator
from fuligo.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from fuligo.algorithms.rewards import Float64Array, Rewards


class Rloo(Estimator):
    """Mean of the group's other responses as baseline."""

    has_group_baseline = True
    uses_kl_coef = True

    def advantages(self, rewards: Rewards, settings: AdvantageSettings) -> list[Float64Array]:
        r = rewards.less_kl(settings)
        return rewards.per_token(r - rewards.mean_of_others(r) if settings.normalize_rewards else r)


ESTIMATOR = Rloo()
