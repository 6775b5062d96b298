"""REINFORCE++: Hu 2025, arXiv:2501.03262.

A_t = r_t + gamma A_{t+1}: the discounted return of every trained token. r_t is -kl_coef times the token's KL, plus the reward at the last
trained token, or the reward of each turn at its end. Whitened over all tokens of the rollout instead of using a group baseline.
Loss: PPO's clipped token ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimator import Estimator
from fuligo.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from fuligo.algorithms.rewards import Float64Array, Rewards
    from fuligo.types import MaskArray


class ReinforcePlusPlus(Estimator):
    """Discounted token returns, whitened over the rollout."""

    uses_kl_coef = True
    uses_gamma = True
    needs_whitening = True

    def advantages(self, rewards: Rewards, settings: AdvantageSettings) -> list[Float64Array]:
        sequences = rewards.sequences(settings)
        return rewards.split(sequences, [discounted_returns(each.rewards, each.loss_mask, settings.gamma) for each in sequences])


def discounted_returns(token_rewards: Float64Array, loss_mask: MaskArray, gamma: float) -> Float64Array:
    """Return the [R] discounted returns A_t = r_t + gamma * A_{t+1}, 0 at masked tokens. `token_rewards` and `loss_mask` are [R].

    t + 1 is the next trained token: masked tokens (such as tool output) are not decisions, so nothing is discounted over them.
    """
    import numpy as np

    trained = np.flatnonzero(loss_mask)
    returns = token_rewards[trained]
    if gamma == 1.0:
        returns = returns[::-1].cumsum()[::-1]
    else:
        for t in range(len(returns) - 2, -1, -1):
            returns[t] += gamma * returns[t + 1]
    placed = np.zeros(len(loss_mask))
    placed[trained] = returns
    return placed


ESTIMATOR = ReinforcePlusPlus()
