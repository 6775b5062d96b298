"""PPO with a value model: Schulman et al. 2017, arXiv:1707.06347; advantages: Schulman et al. 2016, arXiv:1506.02438, equation 16.

delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}. r_t is -kl_coef times the token's KL, plus the reward at the
last trained token, or the reward of each turn at its end. The value model learns the returns A_t + V_t.
Loss: PPO's clipped token ratio; the value model's is `fuligo.algorithms.value_loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.algorithms.estimator import Estimator
from fuligo.algorithms.estimators.reinforce_plus_plus import discounted_returns
from fuligo.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fuligo.algorithms.rewards import Float64Array, Rewards
    from fuligo.types import MaskArray


class Ppo(Estimator):
    """Generalized advantage estimation with a value model."""

    uses_kl_coef = True
    uses_gamma = True
    uses_values = True

    def advantages(self, rewards: Rewards, settings: AdvantageSettings) -> list[Float64Array]:
        import numpy as np

        values = [sample.values for sample in rewards.samples if sample.values is not None]
        assert len(values) == len(rewards.samples), "score() computes values where there is a value model"
        sequences, gamma, lambd = rewards.sequences(settings), settings.gamma, settings.lambd
        in_order = [np.concatenate([values[at] for at in sequence.positions]) for sequence in sequences]
        found = [generalized_advantages(c.rewards, v, c.loss_mask, gamma=gamma, lambd=lambd) for c, v in zip(sequences, in_order)]
        advantages = rewards.split(sequences, found)
        for sample, value, advantage in zip(rewards.samples, values, advantages):
            sample.returns = np.where(sample.loss_mask != 0, advantage + value, 0.0).astype(np.float32)
        return advantages


def generalized_advantages(rewards: ArrayLike, values: ArrayLike, loss_mask: MaskArray, *, gamma: float, lambd: float) -> Float64Array:
    """Return the [R] generalized advantages, 0 at masked tokens. The arguments are [R]; V_t is the value before token t.

    t + 1 is the next trained token: masked tokens (such as tool output) are not decisions, so nothing is discounted over them and their
    values are not read. After the last trained token V = A = 0, even if the response was truncated.
    """
    import numpy as np

    trained = np.flatnonzero(loss_mask)
    rewards, values = np.asarray(rewards, np.float64)[trained], np.asarray(values, np.float64)[trained]
    deltas = np.zeros(len(loss_mask))
    deltas[trained] = rewards + gamma * np.append(values[1:], 0.0) - values
    return discounted_returns(deltas, loss_mask, gamma * lambd)


ESTIMATOR = Ppo()
