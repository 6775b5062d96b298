"""Assignment of advantages to tokens and of samples to optimizer steps."""

from collections.abc import Sized
from itertools import pairwise

import numpy as np

from fuligo.algorithms.distillation import distillation_penalty
from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.rewards import Float64Array, Rewards, whiten
from fuligo.algorithms.settings import AdvantageFn, AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.types import TrainBatch, TrainSample


def assign_advantages(samples: list[TrainSample], settings: AdvantageSettings) -> TrainBatch:
    """Set `advantages` of every sample (with a value model also `returns`) and split the samples into optimizer steps.

    Args:
        samples: in order; `old_logprobs`, and `ref_logprobs` or `teacher_logprobs`, are set where `kl_coef` or `distillation` needs them,
            `values` where the estimator does.

    Raises:
        TrainerError: the samples do not fit the steps, or the custom function returned invalid advantages.
    """
    steps, num_rollouts = cut_into_steps(samples, samples_per_step=settings.samples_per_step, num_steps=settings.num_steps)
    estimator = ESTIMATORS[settings.estimator]
    advantages: list[Float64Array] = []
    # A custom function replaces the advantages but finds the `returns` that an estimator with values sets.
    if settings.custom is None or estimator.uses_values:
        advantages = estimator.advantages(Rewards(samples), settings)
    if settings.custom is not None:
        advantages = _call_custom(settings.custom, samples)
    if settings.whiten:
        advantages = whiten(advantages, [sample.loss_mask for sample in samples], epsilon=settings.std_epsilon)
    if settings.distillation is not None:
        advantages = [values - distillation_penalty(sample, settings.distillation) for sample, values in zip(samples, advantages)]
    for sample, values in zip(samples, advantages):
        sample.advantages = values.astype(np.float32)
    return TrainBatch(samples=samples, steps=steps, num_rollouts_per_step=num_rollouts)


def cut_into_steps(samples: list[TrainSample], *, samples_per_step: int, num_steps: int) -> tuple[list[list[int]], list[int]]:
    """Return the positions in `samples` of every step, and the number of trajectories of every step.

    Steps are consecutive ranges of trajectories; the parts of a split trajectory stay together. If trajectories were lost, the number of
    steps stays (the learning-rate schedule counts on it) and they share the rest as evenly as possible.

    Raises:
        TrainerError: there are more trajectories than the steps hold, or fewer than one per step.
    """
    positions: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        positions.setdefault(sample.index, []).append(position)
    trajectories = list(positions.values())
    if len(trajectories) > samples_per_step * num_steps:
        raise TrainerError(
            f"cannot train on {len(trajectories)} samples in {num_steps} optimizer steps of {samples_per_step} (--global-batch-size); "
            "raise --global-batch-size or --num-steps-per-rollout"
        )
    if len(trajectories) < num_steps:
        raise TrainerError(
            f"cannot fill {num_steps} optimizer steps with {len(trajectories)} usable samples: the others failed or were dropped; "
            "see status, error and drop_reason in the run's samples/"
        )
    bounds = [len(trajectories) * step // num_steps for step in range(num_steps + 1)]
    ranges = [trajectories[start:end] for start, end in pairwise(bounds)]
    steps = [[position for trajectory in chosen for position in trajectory] for chosen in ranges]
    return steps, [len(chosen) for chosen in ranges]


def _call_custom(function: AdvantageFn, samples: list[TrainSample]) -> list[Float64Array]:
    """Return [R] advantages of every sample from a custom function, checked."""
    flag = "--custom-advantage-function-path"
    given = function(samples)
    if not isinstance(given, Sized) or len(given) != len(samples):
        what = f"advantages for {len(given)} samples" if isinstance(given, Sized) else f"{given!r:.80}"
        raise TrainerError(f"{flag} returned {what}; return a list with one array for each of the {len(samples)} samples")
    try:
        advantages = [np.asarray(values, np.float64) for values in given]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainerError(f"{flag} must return a list of arrays of numbers: {error}") from error
    for sample, values in zip(samples, advantages):
        if values.shape != (sample.response_length,):
            raise TrainerError(
                f"{flag} returned advantages of shape {values.shape} for sample {sample.index}, which has {sample.response_length} "
                "response tokens; return one number per response token"
            )
        if not np.isfinite(values).all():
            raise TrainerError(f"{flag} returned a non-finite advantage (NaN or infinity) for sample {sample.index}")
    return advantages
