"""Gradients of one optimizer step: forward and backward over a rank's micro-batches."""

from collections.abc import Callable

import torch
from torch import Tensor

from fuligo.trainer.batch import PackedTokens
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.metric_sums import MetricSums
from fuligo.trainer.objective import LossSettings, objective
from fuligo.trainer.shares import StepShare
from fuligo.trainer.step import StepGradients, loss_inputs, total
from fuligo.trainer.value_objective import value_objective
from fuligo.types import TokenScores

PolicyFn = Callable[[PackedTokens], TokenLogprobs]
ValueFn = Callable[[PackedTokens], Tensor]


def compute_gradients(policy: PolicyFn, step: StepShare, *, settings: LossSettings, device: torch.device) -> StepGradients:
    """Add the gradient of a rank's share of the loss of an optimizer step to the parameters' `grad`.

    Args:
        policy: maps packed tokens to log-probabilities.
    """
    sums: list[MetricSums] = []
    losses: list[Tensor] = []
    scores: dict[int, TokenScores] = {}
    num_tokens = 0
    for plan in step.schedule.plans:
        inputs = step.samples.micro_batch(plan, device)
        outputs = policy(inputs.tokens)
        result = objective(loss_inputs(inputs, outputs, settings), settings)
        result.loss.backward()
        sums.append(result.sums)
        losses.append(result.loss.detach())
        scores |= step.samples.scores(plan, inputs.tokens, outputs)
        num_tokens += inputs.tokens.num_tokens if plan.counts else 0
    return StepGradients(total(sums), torch.stack(losses), scores, num_tokens)


def compute_value_gradients(value_model: ValueFn, step: StepShare, *, clip: float, device: torch.device) -> StepGradients:
    """Add the gradient of the value loss, as `compute_gradients` does for the policy; returns no scores.

    Args:
        value_model: maps packed tokens to the values [N] of their response tokens.
        clip: distance from the old values.
    """
    sums: list[MetricSums] = []
    losses: list[Tensor] = []
    num_tokens = 0
    for plan in step.schedule.plans:
        inputs = step.samples.micro_batch(plan, device)
        result = value_objective(value_model(inputs.tokens), inputs, clip)
        result.loss.backward()
        sums.append(result.sums)
        losses.append(result.loss.detach())
        num_tokens += inputs.tokens.num_tokens if plan.counts else 0
    return StepGradients(total(sums), torch.stack(losses), {}, num_tokens)
