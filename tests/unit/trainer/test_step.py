"""An optimizer step's part of the rollout's batch."""

import numpy as np
import pytest
import torch

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.step import StepSamples, require_finite
from tests.random_samples import random_samples


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("step", [0, 1])
def test_weights_are_those_of_the_mean_that_the_loss_asks_for(per_token: bool, step: int) -> None:
    batch = assign_advantages(random_samples(3), AdvantageSettings(samples_per_step=6, num_steps=2))
    taken = StepSamples.of(batch, step, LossSettings(per_token=per_token))
    masks = [sample.loss_mask != 0 for sample in taken.samples]
    assert all(sample is batch.samples[i] for sample, i in zip(taken.samples, batch.steps[step], strict=True))
    trained = [weights[mask] for weights, mask in zip(taken.weights, masks)]
    if per_token:
        np.testing.assert_allclose(np.concatenate(trained), 1 / sum(mask.sum() for mask in masks), rtol=1e-6)
    else:
        shares = {sample.index: 0.0 for sample in taken.samples}
        for sample, weights in zip(taken.samples, trained):
            shares[sample.index] += weights.sum()
        any_trained = {sample.index for sample, mask in zip(taken.samples, masks) if mask.any()}
        assert shares == pytest.approx({index: (index in any_trained) / len(shares) for index in shares}, rel=1e-6)
    assert all((weights[~mask] == 0).all() for weights, mask in zip(taken.weights, masks))


def test_a_loss_or_a_gradient_that_is_not_finite_is_refused() -> None:
    losses = torch.tensor([[0.5, -0.5], [0.25, float("nan")]])
    with pytest.raises(TrainerError, match=r"optimizer step 7: the loss of micro-batch 1 on rank 1 is not finite"):
        require_finite(losses, 1.0, optimizer_step=7)
    with pytest.raises(TrainerError, match=r"optimizer step 7: the gradient norm \(inf\) is not finite"):
        require_finite(losses[:1], float("inf"), optimizer_step=7)
    require_finite(losses[:1], 1.0, optimizer_step=7)
