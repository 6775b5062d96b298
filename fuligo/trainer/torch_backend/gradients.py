"""Gradients of one optimizer step: forward and backward over a rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuligo.trainer.batch import PackedTokens
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.metric_sums import MetricSums
from fuligo.trainer.objective import LossSettings, objective
from fuligo.trainer.packing import MicroBatchPlan
from fuligo.trainer.step import StepGradients, StepSamples, loss_inputs, total
from fuligo.types import TokenScores, TrainBatch

PolicyFn = Callable[[PackedTokens], TokenLogprobs]


def compute_gradients(
    policy: PolicyFn, batch: TrainBatch, step: int, plans: Sequence[MicroBatchPlan], *, settings: LossSettings, device: torch.device
) -> StepGradients:
    """Add the gradient of a rank's share of the loss of `batch.steps[step]` to the parameters' `grad`.

    Args:
        policy: maps packed tokens to log-probabilities.
        batch: the whole rollout.
        step: which of its optimizer steps.
        plans: the rank's micro-batches, as positions in `batch.steps[step]`; at least one.
        settings: of the loss.
        device: where the policy is.
    """
    samples = StepSamples.of(batch, step, settings)
    sums: list[MetricSums] = []
    losses: list[Tensor] = []
    scores: dict[int, TokenScores] = {}
    num_tokens = 0
    for plan in plans:
        inputs = samples.micro_batch(plan, device)
        outputs = policy(inputs.tokens)
        result = objective(loss_inputs(inputs, outputs, settings), settings)
        result.loss.backward()
        sums.append(result.sums)
        losses.append(result.loss.detach())
        scores |= samples.scores(plan, inputs.tokens, outputs)
        num_tokens += inputs.tokens.num_tokens if plan.counts else 0
    return StepGradients(total(sums), torch.stack(losses), scores, num_tokens)
