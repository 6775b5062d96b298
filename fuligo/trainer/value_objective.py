"""Loss of the value model on a packed micro-batch, shared by all backends, and a rollout's metrics of the values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fuligo.algorithms.value_loss import value_fit, value_loss
from fuligo.trainer.batch import MicroBatch
from fuligo.trainer.metric_sums import MetricSums
from fuligo.trainer.objective import Objective
from fuligo.types import TrainSample


def value_objective(values: Tensor, batch: MicroBatch, clip: float) -> Objective:
    """Compute a micro-batch's share of the step's value loss, with the token weights of the policy loss.

    Metrics: `value_loss`, and `value_clip_fraction`, the share of tokens without gradient.

    Args:
        values: [N] with gradient.
        batch: with `values` and `returns`.
        clip: distance from the old values.
    """
    assert values.dtype == torch.float32, f"values of type {values.dtype}; float32 is needed"
    assert batch.values is not None and batch.returns is not None, "scored by the value model"
    mask = batch.loss_mask != 0
    trained, old, returns = (torch.where(mask, each, 0.0) for each in (values, batch.values, batch.returns))
    terms = value_loss(trained, old, returns, clip)
    loss = (batch.weights * terms.loss).sum()
    return Objective(loss, MetricSums.of({"value_loss": loss}, {"value_clip_fraction": terms.clipped.float()}, batch.weights))


def value_metrics(samples: Sequence[TrainSample]) -> dict[str, float]:
    """Return `train/value_mean`, `train/return_mean` and `train/explained_variance` of a rollout; empty without a value model."""
    scored = [(sample.values, sample.returns, sample.loss_mask) for sample in samples if sample.values is not None]
    if not scored:
        return {}
    values, returns, masks = zip(*scored, strict=True)
    fit = value_fit(values, returns, masks)
    return {
        "train/value_mean": fit.value_mean,
        "train/return_mean": fit.return_mean,
        "train/explained_variance": fit.explained_variance,
    }
