"""Rewards of a rollout and the statistics of its groups. Axes: N samples, M trajectories, R response tokens.

All arithmetic is float64: in float32 the standard deviation of equal rewards is rounding noise, and dividing by it would amplify that
noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fuligo.algorithms.kl import kl_estimate
from fuligo.algorithms.settings import STD_EPSILON, AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.types import FloatArray, MaskArray, TrainSample

Float64Array = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class TokenSequence:
    """L tokens over which returns are computed: the response of one sample, or the responses of all samples of an episode in order."""

    positions: list[int]
    """Positions of the samples in the rollout."""
    loss_mask: MaskArray
    """[L] 1 on tokens to train, else 0."""
    rewards: Float64Array
    """[L] token rewards minus KL penalties."""


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

    def less_kl(self, settings: AdvantageSettings) -> Float64Array:
        """Return the [N] rewards minus `kl_penalties` summed over the trained tokens of the trajectory."""
        penalties = np.array([penalty.sum() for penalty in self.kl_penalties(settings)])
        return self.values - self._sum_by_trajectory(penalties)[self._trajectory_of]

    def sequences(self, settings: AdvantageSettings) -> list["TokenSequence"]:
        """Return the token sequences over which returns are computed: one per sample, or one per episode with `rewards_by_turn`.

        Raises TrainerError if `rewards_by_turn` is set and a sample has no `turn_rewards`.
        """
        penalties = self.kl_penalties(settings)
        if not settings.rewards_by_turn:
            alone = zip(self.samples, penalties)
            return [
                TokenSequence([at], s.loss_mask, token_rewards(s.reward, s.loss_mask, penalty)) for at, (s, penalty) in enumerate(alone)
            ]
        episodes: dict[int, list[int]] = {}
        for position, sample in enumerate(self.samples):
            episodes.setdefault(sample.index, []).append(position)
        return [_sequence_by_turn([(at, self.samples[at], penalties[at]) for at in positions]) for positions in episodes.values()]

    def split(self, sequences: Sequence["TokenSequence"], values: Sequence[Float64Array]) -> list[Float64Array]:
        """Split the [L] values of each token sequence into [R] values for each sample."""
        result: list[Float64Array] = [np.empty(0)] * len(self.samples)
        for sequence, array in zip(sequences, values):
            ends = np.cumsum([self.samples[at].response_length for at in sequence.positions])
            for at, part in zip(sequence.positions, np.split(array, ends[:-1])):
                result[at] = part
        return result

    def kl_penalties(self, settings: AdvantageSettings) -> list[Float64Array]:
        """Return kl_coef times the estimated KL(old policy || reference) of every sample's tokens: [R] each, 0 at masked tokens.

        Raises TrainerError if kl_coef is not 0 and log-probabilities are missing.
        """
        if not settings.kl_coef:
            return [np.zeros(sample.response_length) for sample in self.samples]
        return [_kl_penalty(sample, settings) for sample in self.samples]

    def group_mean(self, values: Float64Array) -> Float64Array:
        """Return the mean of each sample's group: [N] -> [N]."""
        first = self._first_of_group(values)
        return first + self._by_group(values - first, lambda group: np.full_like(group, group.mean()))

    def mean_of_others(self, values: Float64Array) -> Float64Array:
        """Return the mean of each sample's group without the sample's trajectory, or its own value in a group of one: [N] -> [N]."""
        first = self._first_of_group(values)
        return first + self._by_group(values - first, mean_of_others)

    def group_std(self, values: Float64Array, epsilon: float) -> Float64Array:
        """Return the unbiased standard deviation of each sample's group + epsilon; 1 in a group of one: [N] -> [N]."""
        return self._by_group(values - self._first_of_group(values), lambda group: np.full_like(group, std(group, epsilon=epsilon)))

    def per_token(self, values: Float64Array) -> list[Float64Array]:
        """Repeat each sample's value for all its response tokens: [N] -> [R] for each sample."""
        return [np.full(sample.response_length, value) for sample, value in zip(self.samples, values)]

    def _first_of_group(self, values: Float64Array) -> Float64Array:
        """Return the first value of each sample's group: [N] -> [N].

        Statistics are computed on differences from it, which are exactly 0 if all values of a group are equal. The mean itself would be
        rounded: six times 0.1, summed and divided by 6, is not 0.1.
        """
        _, first, group = np.unique(self._groups[self._trajectory_of], return_index=True, return_inverse=True)
        return values[first][group]

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
    """Return, for each reward of a group, the mean of the others; in a group of one, the reward itself: [G] -> [G]."""
    rewards = np.asarray(rewards, np.float64)
    return (rewards.sum() - rewards) / (len(rewards) - 1) if len(rewards) > 1 else rewards


def std(values: ArrayLike, *, epsilon: float = STD_EPSILON) -> float:
    """Return the unbiased standard deviation + epsilon; 1 for fewer than two values."""
    values = np.asarray(values, np.float64)
    return float(values.std(ddof=1)) + epsilon if len(values) > 1 else 1.0


def token_rewards(reward: float, loss_mask: MaskArray, penalty: ArrayLike) -> Float64Array:
    """Return the [R] token rewards: `reward` at the last trained token, minus the [R] `penalty` of each trained token; 0 elsewhere."""
    trained = np.flatnonzero(loss_mask)
    rewards = np.zeros(len(loss_mask))
    rewards[trained] -= np.asarray(penalty, np.float64)[trained]
    if len(trained):
        rewards[trained[-1]] += reward
    return rewards


def _sequence_by_turn(parts: Sequence[tuple[int, TrainSample, Float64Array]]) -> TokenSequence:
    """Return the token sequence of an episode, with each turn's reward at the last trained token up to the end of the turn.

    Args:
        parts: position, sample and [R] KL penalty of each sample of the episode.

    Raises:
        TrainerError: a sample has no rewards by turn.
    """
    mask = np.concatenate([sample.loss_mask for _, sample, _ in parts])
    rewards = np.where(mask != 0, -np.concatenate([penalty for *_, penalty in parts]), 0.0)
    trained, start = np.flatnonzero(mask), 0
    for _, sample, _ in parts:
        if sample.turn_rewards is None:
            raise TrainerError(
                f"cannot place the rewards of sample {sample.index} by turn: it has no rewards by turn; remove --turn-rewards"
            )
        for turn in sample.turn_rewards:
            number = np.searchsorted(trained, start + turn.end)
            if number:  # without a trained token up to here, no decision earned the reward
                rewards[trained[number - 1]] += turn.reward
        start += sample.response_length
    return TokenSequence([position for position, *_ in parts], mask, rewards)


def whiten(values: Sequence[ArrayLike], masks: Sequence[MaskArray], *, epsilon: float = STD_EPSILON) -> list[Float64Array]:
    """Whiten the [R] values of all samples together: (x - mean) / (unbiased standard deviation + epsilon).

    Mean and standard deviation are over the unmasked tokens of all samples. Masked tokens become 0. With fewer than two unmasked tokens,
    the divisor is 1.
    """
    arrays = [np.asarray(value, np.float64) for value in values]
    trained = np.concatenate([array[mask != 0] for array, mask in zip(arrays, masks)]) if arrays else np.empty(0)
    if len(trained) == 0:
        return [np.zeros_like(array) for array in arrays]
    mean, divisor = trained.mean(), std(trained, epsilon=epsilon)
    return [np.where(mask != 0, (array - mean) / divisor, 0.0) for array, mask in zip(arrays, masks)]


def old_logprobs(sample: TrainSample, settings: AdvantageSettings) -> FloatArray | None:
    """Return the [R] log-probabilities of the old policy, the engine's or the trainer's (`settings.old_from_engine`); None if unset."""
    return sample.engine_logprobs if settings.old_from_engine else sample.old_logprobs


def _kl_penalty(sample: TrainSample, settings: AdvantageSettings) -> Float64Array:
    old, reference = old_logprobs(sample, settings), sample.ref_logprobs
    if old is None or reference is None:
        missing = "old" if old is None else "reference"
        raise TrainerError(
            f"cannot compute the KL of --kl-coef for sample {sample.index}: it has no {missing} log-probabilities; score the rollout first"
        )
    # Masked tokens may hold anything, including -inf and NaN.
    trained = np.flatnonzero(sample.loss_mask)
    of_policy, of_reference = (torch.from_numpy(values[trained].astype(np.float64)) for values in (old, reference))
    penalty = np.zeros(sample.response_length)
    penalty[trained] = settings.kl_coef * kl_estimate(of_policy, of_reference, settings.kl_type).numpy()
    return penalty
