"""Rewards of a rollout and the statistics of its groups. Axes: N samples, M trajectories, R response tokens.

All arithmetic is float64: in float32 the standard deviation of equal rewards is rounding noise, and dividing by it would amplify that
noise.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fuligo.algorithms.settings import STD_EPSILON
from fuligo.errors import TrainerError
from fuligo.types import FloatArray, MaskArray, TrainSample

Float64Array = NDArray[np.float64]


class Rewards:
    """Rewards of a rollout's samples, by trajectory and by group.

    A trajectory that was split into several samples (equal `index`) counts once in its group, with the mean of its parts' rewards.
    """

    def __init__(self, samples: Sequence[TrainSample]) -> None:
        self.samples = samples
        self.values: Float64Array = np.array([sample.reward for sample in samples], np.float64)
        """[N] reward of each sample."""
        indices = np.array([sample.index for sample in samples])
        groups = np.array([sample.group_index for sample in samples])
        _, first, self._trajectory_of = np.unique(indices, return_index=True, return_inverse=True)
        self._groups = groups[first]

    def less_kl(self, kl_coef: float) -> Float64Array:
        """Return [N] rewards less kl_coef times the KL to the reference, summed over the trajectory's trained tokens.

        Raises:
            TrainerError: kl_coef is not 0 and log-probabilities are missing.
        """
        if not kl_coef:
            return self.values
        kls = np.array([_kl(sample) @ (sample.loss_mask != 0) for sample in self.samples], np.float64)
        return self.values - kl_coef * self._sum_by_trajectory(kls)[self._trajectory_of]

    def token_rewards(self, kl_coef: float) -> list[Float64Array]:
        """Return [R] rewards of every sample's tokens; see `token_rewards`.

        Raises:
            TrainerError: kl_coef is not 0 and log-probabilities are missing.
        """
        return [
            token_rewards(sample.reward, sample.loss_mask, _kl(sample) if kl_coef else np.zeros(sample.response_length), kl_coef)
            for sample in self.samples
        ]

    def group_mean(self, values: Float64Array) -> Float64Array:
        """Return the mean of each sample's group: [N] -> [N]."""
        return self._by_group(values, lambda group: np.full_like(group, group.mean()))

    def mean_of_others(self, values: Float64Array) -> Float64Array:
        """Return the mean of each sample's group without its own trajectory; in a group of one its own: [N] -> [N]."""
        return self._by_group(values, mean_of_others)

    def group_std(self, values: Float64Array, epsilon: float) -> Float64Array:
        """Return the unbiased standard deviation of each sample's group + epsilon; 1 in a group of one: [N] -> [N]."""
        return self._by_group(values, lambda group: np.full_like(group, std(group, epsilon=epsilon)))

    def per_token(self, values: Float64Array) -> list[Float64Array]:
        """Repeat each sample's value for all its response tokens: [N] -> [R] for each sample."""
        return [np.full(sample.response_length, value) for sample, value in zip(self.samples, values)]

    def _by_group(self, values: Float64Array, function: Callable[[Float64Array], Float64Array]) -> Float64Array:
        means = self._sum_by_trajectory(values) / self._sum_by_trajectory(np.ones_like(values))
        result = np.empty_like(means)
        for group in np.unique(self._groups):
            members = self._groups == group
            result[members] = function(means[members])
        return result[self._trajectory_of]

    def _sum_by_trajectory(self, values: Float64Array) -> Float64Array:
        """Sum values by trajectory: [N] -> [M]."""
        sums = np.zeros(len(self._groups))
        np.add.at(sums, self._trajectory_of, values)
        return sums


def mean_of_others(rewards: ArrayLike) -> Float64Array:
    """Return the leave-one-out mean of each reward of a group; in a group of one its own: [G] -> [G]."""
    rewards = np.asarray(rewards, np.float64)
    return (rewards.sum() - rewards) / (len(rewards) - 1) if len(rewards) > 1 else rewards


def std(values: ArrayLike, *, epsilon: float = STD_EPSILON) -> float:
    """Return the unbiased standard deviation + epsilon; 1 for fewer than two values."""
    values = np.asarray(values, np.float64)
    return float(values.std(ddof=1)) + epsilon if len(values) > 1 else 1.0


def token_rewards(reward: float, loss_mask: MaskArray, kl: ArrayLike, kl_coef: float) -> Float64Array:
    """Return [R]: the reward at the last trained token, less kl_coef * `kl` [R], the KL to the reference, at every trained token.

    With no token set in `loss_mask` [R] all rewards are 0. The KL at masked tokens is not used.
    """
    trained = np.flatnonzero(loss_mask)
    rewards = np.zeros(len(loss_mask))
    rewards[trained] = -kl_coef * np.asarray(kl, np.float64)[trained]
    if len(trained):
        rewards[trained[-1]] += reward
    return rewards


def whiten(values: Sequence[ArrayLike], masks: Sequence[MaskArray], *, epsilon: float = STD_EPSILON) -> list[Float64Array]:
    """Return (x - mean) / (unbiased standard deviation + epsilon), both over the unmasked tokens of all samples, [R] each, together.

    Masked tokens are not counted and come out as 0. Fewer than two unmasked tokens are not divided.
    """
    arrays = [np.asarray(value, np.float64) for value in values]
    trained = np.concatenate([array[mask != 0] for array, mask in zip(arrays, masks)]) if arrays else np.empty(0)
    if len(trained) == 0:
        return [np.zeros_like(array) for array in arrays]
    mean, divisor = trained.mean(), std(trained, epsilon=epsilon)
    return [np.where(mask != 0, (array - mean) / divisor, 0.0) for array, mask in zip(arrays, masks)]


def _kl(sample: TrainSample) -> FloatArray:
    """Return [R] the k1 estimate of KL(old policy || reference)."""
    if sample.old_logprobs is None or sample.ref_logprobs is None:
        missing = "old" if sample.old_logprobs is None else "reference"
        raise TrainerError(f"cannot compute the KL of --kl-coef for sample {sample.index}: it has no {missing} log-probabilities")
    return sample.old_logprobs - sample.ref_logprobs
