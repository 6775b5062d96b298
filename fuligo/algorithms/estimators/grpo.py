"""Group relative policy optimization (GRPO): Shao et al. 2024, DeepSeekMath, arXiv:2402.03300.

A = (r - mean of the group) / (std of the group + epsilon), the same for all tokens of a response.
Loss: PPO's clipped token ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimator import Estimator
from fuligo.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from fuligo.algorithms.rewards import Float64Array, Rewards


class Grpo(Estimator):
    """Group mean as baseline, group standard deviation as scale."""

    has_group_baseline = True
    divides_by_std = True

    def advantages(self, rewards: Rewards, settings: AdvantageSettings) -> list[Float64Array]:
        r = rewards.values
        if not settings.normalize_rewards:
            return rewards.per_token(r)
        centred = r - rewards.group_mean(r)
        return rewards.per_token(centred / rewards.group_std(r, settings.std_epsilon) if settings.divide_by_std else centred)


ESTIMATOR = Grpo()
