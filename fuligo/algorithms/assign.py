"""Assignment of advantages and loss weights to tokens, and of samples to optimizer steps.

The denominators of the weights belong to a whole step and are known before it is split into micro-batches and ranks. The loss is therefore
a plain sum of weight * token loss, independent of packing, splitting and order.
"""

import logging
from collections.abc import Sized
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.rewards import Float64Array, Rewards, old_logprobs, whiten
from fuligo.algorithms.settings import AdvantageFn, AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.quantities import count
from fuligo.types import FloatArray, TrainBatch, TrainSample

logger = logging.getLogger(__name__)


def assign_advantages(samples: list[TrainSample], settings: AdvantageSettings) -> TrainBatch:
    """Set the `advantages` of every sample (and its `returns` with a value model), and split the samples into optimizer steps.

    `kl_coef` needs `ref_logprobs`, `distillation` needs `teacher_logprobs`, and both need the old policy's log-probabilities
    (`rewards.old_logprobs`); an estimator with `uses_values` needs `values`. Raises TrainerError if a sample lacks what the settings need,
    the samples do not fit the steps, or the custom function returned invalid advantages.
    """
    steps, num_rollouts = cut_into_steps(samples, samples_per_step=settings.samples_per_step, num_steps=settings.num_steps)
    estimator = ESTIMATORS[settings.estimator]
    advantages: list[Float64Array] = []
    # A custom function replaces only the advantages: the value model still learns the estimator's `returns`.
    if settings.custom is None or estimator.uses_values:
        advantages = estimator.advantages(Rewards(samples), settings)
    if settings.custom is not None:
        advantages = _call_custom(settings.custom, samples)
    if settings.distillation is not None:
        advantages = [values - distillation_penalty(sample, settings) for sample, values in zip(samples, advantages)]
    if settings.whiten:
        advantages = whiten(advantages, [sample.loss_mask for sample in samples], epsilon=settings.std_epsilon)
    for sample, values in zip(samples, advantages):
        sample.advantages = values.astype(np.float32)
    return TrainBatch(samples=samples, steps=steps, num_rollouts_per_step=num_rollouts)


def cut_into_steps(samples: list[TrainSample], *, samples_per_step: int, num_steps: int) -> tuple[list[list[int]], list[int]]:
    """Return each step's positions in `samples`, and each step's number of trajectories.

    Steps are consecutive ranges of trajectories; the parts of a split trajectory stay together. If some trajectories were lost, the
    number of steps does not change, because the learning-rate schedule depends on it; the remaining ones are spread evenly over the steps.
    With fewer trajectories than steps, each trajectory becomes a step. Raises TrainerError if there are no trajectories, or more than
    `samples_per_step * num_steps`.
    """
    positions: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        positions.setdefault(sample.index, []).append(position)
    trajectories = list(positions.values())
    if len(trajectories) > samples_per_step * num_steps:
        raise TrainerError(
            f"cannot train on {len(trajectories)} samples in {count(num_steps, 'optimizer step')} of {samples_per_step} "
            "(--global-batch-size); raise --global-batch-size or --num-steps-per-rollout"
        )
    if not trajectories:
        raise TrainerError(
            "cannot train on a rollout without usable samples: all failed or were dropped; see status, error and drop_reason in the run's "
            "samples/"
        )
    if len(trajectories) < num_steps:
        logger.warning(
            "the rollout has only %s; taking one optimizer step per sample instead of %d steps",
            count(len(trajectories), "usable sample"),
            num_steps,
        )
        num_steps = len(trajectories)
    bounds = [len(trajectories) * step // num_steps for step in range(num_steps + 1)]
    ranges = [trajectories[start:end] for start, end in pairwise(bounds)]
    steps = [[position for trajectory in chosen for position in trajectory] for chosen in ranges]
    return steps, [len(chosen) for chosen in ranges]


def _call_custom(function: AdvantageFn, samples: list[TrainSample]) -> list[Float64Array]:
    """Return the [R] advantages of every sample from a custom function. Raises TrainerError if they are invalid."""
    flag = "--custom-advantage-function-path"
    given = function(samples)
    if not isinstance(given, Sized) or len(given) != len(samples):
        what = f"advantages for {count(len(given), 'sample')}" if isinstance(given, Sized) else f"{given!r:.80}"
        raise TrainerError(f"{flag} returned {what}; return a list with one array for each of the {len(samples)} samples")
    try:
        advantages = [np.asarray(values, np.float64) for values in given]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainerError(f"{flag} must return a list of arrays of numbers: {error}") from error
    for sample, values in zip(samples, advantages):
        if values.shape != (sample.response_length,):
            raise TrainerError(
                f"{flag} returned advantages of shape {values.shape} for sample {sample.index}, which has "
                f"{count(sample.response_length, 'response token')}; return one number per response token"
            )
        if not np.isfinite(values).all():
            raise TrainerError(f"{flag} returned a non-finite advantage (NaN or infinity) for sample {sample.index}; return finite numbers")
    return advantages


def distillation_penalty(sample: TrainSample, settings: AdvantageSettings) -> FloatArray:
    """Return the [R] penalty of on-policy distillation (Thinking Machines Lab, "On-Policy Distillation", 2025).

    The penalty is settings.distillation * d, where d is the student's log-probability of the sampled token minus the teacher's, in nats;
    0 at masked tokens. The mean of d over the student's samples is KL(student || teacher). A token's penalty does not include later
    tokens (discount 0). Raises TrainerError if the student's or the teacher's log-probabilities are missing.
    """
    student = old_logprobs(sample, settings)
    if student is None or sample.teacher_logprobs is None:
        missing = "student" if student is None else "teacher"
        raise TrainerError(
            f"cannot compute the penalty of --use-opd for sample {sample.index}: it has no {missing} log-probabilities; score the rollout "
            "first"
        )
    # Masked tokens may hold anything, including -inf and NaN.
    trained = sample.loss_mask != 0
    difference = np.subtract(student, sample.teacher_logprobs, where=trained, out=np.zeros(len(trained), np.float32))
    return np.float32(settings.distillation or 0.0) * difference


@dataclass(slots=True, frozen=True)
class StepDenominators:
    """Denominators of the means over one optimizer step."""

    num_rollouts: int
    """Number of trajectories of the step, fully masked ones included; one that was split into several samples counts once."""
    num_tokens: int
    """Number of unmasked response tokens of the step."""

    def share(self, *, per_token: bool) -> float:
        """Return 1 / num_rollouts, or 1 / num_tokens with `per_token`; 0 if the step has no unmasked tokens."""
        return 1 / (self.num_tokens if per_token else self.num_rollouts or 1) if self.num_tokens else 0.0


def step_denominators(batch: TrainBatch, step: int) -> StepDenominators:
    num_tokens = sum(int(np.count_nonzero(batch.samples[i].loss_mask)) for i in batch.steps[step])
    return StepDenominators(num_rollouts=batch.num_rollouts_per_step[step], num_tokens=num_tokens)


def token_weights(sample: TrainSample, denominators: StepDenominators, *, per_token: bool) -> FloatArray:
    """Return the [R] weights of the response tokens in the step's loss; 0 at masked tokens.

    By default mask / (mask sum of the trajectory * trajectories of the step): the mean over a trajectory's unmasked tokens, then over
    trajectories. With `per_token` (`--calculate-per-token-loss`) mask / unmasked tokens of the step: one mean over all tokens.
    """
    denominator = denominators.num_tokens if per_token else sample.mask_sum * denominators.num_rollouts
    mask = sample.loss_mask != 0
    if not mask.any():
        return np.zeros(len(mask), np.float32)
    return (mask / denominator).astype(np.float32)
