"""Gradients of one optimizer step: forward and backward over a rank's micro-batches."""

from collections.abc import Callable

import torch
from torch import Tensor

from fuligo.trainer.batch import MicroBatch, PackedTokens
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.metric_sums import MetricSums
from fuligo.trainer.objective import LossSettings, Objective, objective, value_objective
from fuligo.trainer.packing import MicroBatchPlan
from fuligo.trainer.shares import StepShare
from fuligo.trainer.step import StepGradients, loss_inputs, total
from fuligo.types import TokenScores

PolicyFn = Callable[[PackedTokens], TokenLogprobs]
ValueFn = Callable[[PackedTokens], Tensor]


def compute_gradients(policy: PolicyFn, step: StepShare, *, settings: LossSettings, device: torch.device) -> StepGradients:
    """Add the gradient of a rank's share of the loss of an optimizer step to the parameters' `grad`.

    Args:
        policy: maps packed tokens to log-probabilities.
    """
    scores: dict[int, TokenScores] = {}

    def loss_of(plan: MicroBatchPlan, inputs: MicroBatch) -> Objective:
        outputs = policy(inputs.tokens)
        scores.update(step.samples.scores(plan, inputs.tokens, outputs))
        return objective(loss_inputs(inputs, outputs, settings), settings)

    return _sum_gradients(step, loss_of, scores, device)


def compute_value_gradients(value_model: ValueFn, step: StepShare, *, clip: float, device: torch.device) -> StepGradients:
    """Add the gradient of the value loss, as `compute_gradients` does for the policy; returns no scores.

    Args:
        value_model: maps packed tokens to the values [N] of their response tokens.
        clip: distance from the old values.
    """
    return _sum_gradients(step, lambda _, inputs: value_objective(value_model(inputs.tokens), inputs, clip), {}, device)


def _sum_gradients(
    step: StepShare,
    loss_of: Callable[[MicroBatchPlan, MicroBatch], Objective],
    scores: dict[int, TokenScores],
    device: torch.device,
) -> StepGradients:
    """Run the backward pass of each micro-batch's loss; return the results with the scores that `loss_of` has filled in."""
    sums: list[MetricSums] = []
    losses: list[Tensor] = []
    num_tokens = 0
    for plan in step.schedule.plans:
        inputs = step.samples.micro_batch(plan, device)
        result = loss_of(plan, inputs)
        result.loss.backward()
        sums.append(result.sums)
        losses.append(result.loss.detach())
        num_tokens += inputs.tokens.num_tokens if plan.counts else 0
    return StepGradients(total(sums), torch.stack(losses), scores, num_tokens)
