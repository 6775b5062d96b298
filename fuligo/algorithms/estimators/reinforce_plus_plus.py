"""REINFORCE++: Hu 2025, arXiv:2501.03262.

A_t = r_t + gamma A_{t+1}: the discounted return of every token. r_t is -kl_coef times the token's KL, plus the reward at the last trained
token. Whitened over all tokens of the rollout, hence without a group's baseline.
Loss: PPO's clipped token ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimator import Estimator
from fuligo.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from fuligo.algorithms.rewards import Float64Array, Rewards


class ReinforcePlusPlus(Estimator):
    """Discounted token returns, whitened over the rollout."""

    uses_kl_coef = True
    uses_gamma = True
    needs_whitening = True

    def advantages(self, rewards: Rewards, settings: AdvantageSettings) -> list[Float64Array]:
        token_rewards = rewards.token_rewards(settings.kl_coef)
        return [discounted_returns(r, settings.gamma) * (s.loss_mask != 0) for s, r in zip(rewards.samples, token_rewards)]


def discounted_returns(token_rewards: Float64Array, gamma: float) -> Float64Array:
    """Return A_t = r_t + gamma * A_{t+1} for every token.

    Args:
        token_rewards: [R]

    Returns:
        [R]
    """
    if gamma == 1.0:
        return token_rewards[::-1].cumsum()[::-1]
    returns = token_rewards.copy()
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * returns[t + 1]
    return returns


ESTIMATOR = ReinforcePlusPlus()
