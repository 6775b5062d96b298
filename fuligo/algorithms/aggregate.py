"""Weights of tokens in the loss of an optimizer step.

The denominators belong to the whole step and are known before it is split into micro-batches and ranks. The loss is therefore a plain sum
of weight * token loss, independent of packing, splitting and order.
"""

from dataclasses import dataclass

import numpy as np

from fuligo.types import FloatArray, TrainBatch, TrainSample


@dataclass(slots=True, frozen=True)
class StepDenominators:
    """Denominators of the means over one optimizer step."""

    num_rollouts: int
    """Trajectories of the step, fully masked ones included; one that was split into several samples counts once."""
    num_tokens: int
    """Unmasked response tokens of the step."""


def step_denominators(batch: TrainBatch, step: int) -> StepDenominators:
    """Return the denominators of the step `batch.steps[step]`."""
    num_tokens = sum(int(np.count_nonzero(batch.samples[i].loss_mask)) for i in batch.steps[step])
    return StepDenominators(num_rollouts=batch.num_rollouts_per_step[step], num_tokens=num_tokens)


def token_weights(sample: TrainSample, denominators: StepDenominators, *, per_token: bool) -> FloatArray:
    """Return the weight of each response token in the step's loss; 0 where it is masked.

    By default mask / (mask sum of the trajectory * trajectories of the step): the mean over a trajectory's unmasked tokens, then over
    trajectories. With `per_token` (`--calculate-per-token-loss`) mask / unmasked tokens of the step: one mean over all tokens.

    Returns:
        [R]
    """
    denominator = denominators.num_tokens if per_token else sample.mask_sum * denominators.num_rollouts
    mask = sample.loss_mask != 0
    if not mask.any():
        return np.zeros(len(mask), np.float32)
    return (mask / denominator).astype(np.float32)
