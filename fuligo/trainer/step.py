"""Optimizer steps: the parts before and after the model's passes that all backends share."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Self

import torch
from torch import Tensor

from fuligo.algorithms.assign import StepDenominators, step_denominators, token_weights
from fuligo.errors import TrainerError
from fuligo.trainer.batch import MicroBatch, PackedTokens, micro_batch
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.metric_sums import MetricSums
from fuligo.trainer.objective import LossInputs, LossSettings
from fuligo.trainer.packing import MicroBatchPlan
from fuligo.trainer.ranks.world import World
from fuligo.types import FloatArray, TokenScores, TrainBatch, TrainSample


@dataclass(slots=True)
class Progress:
    """Counters of training."""

    num_optimizer_steps: int = 0
    num_rollouts: int = 0


@dataclass(slots=True, frozen=True)
class StepSamples:
    """Samples of one optimizer step, all or one replica's, with counts over the whole step."""

    positions: Sequence[int]
    """Positions in the rollout's batch."""
    samples: list[TrainSample]
    denominators: StepDenominators
    per_token: bool
    """`LossSettings.per_token`"""
    num_tokens: int
    """Tokens of the whole step that go through the model: all but the last of each trained sample."""
    num_choices: int
    """Expert choices that all samples of the step record."""

    @classmethod
    def of(cls, batch: TrainBatch, step: int, settings: LossSettings, positions: Sequence[int] | None = None) -> Self:
        """Return the samples of an optimizer step.

        Args:
            positions: positions of the step's samples that are trained; None: all. The denominators are the whole step's in any case.
        """
        positions = batch.steps[step] if positions is None else positions
        samples = [batch.samples[i] for i in positions]
        num_tokens = sum(len(sample.tokens) - 1 for sample in samples)
        return cls(positions, samples, step_denominators(batch, step), settings.per_token, num_tokens, num_choices(samples))

    def select(self, chosen: Sequence[int]) -> Self:
        return replace(self, positions=[self.positions[i] for i in chosen], samples=[self.samples[i] for i in chosen])

    @property
    def weights(self) -> list[FloatArray]:
        """[R] weights of each sample's tokens in the loss of the whole step."""
        return [self._weights(sample) for sample in self.samples]

    def micro_batch(self, plan: MicroBatchPlan, device: torch.device) -> MicroBatch:
        chosen = [self.samples[i] for i in plan.samples]
        share = self.denominators.share(per_token=self.per_token)
        weights = [self._weights(sample) for sample in chosen]
        return micro_batch(chosen, weights, device, counts=plan.counts, share=share, shared=plan.shared)

    def scores(self, plan: MicroBatchPlan, tokens: PackedTokens, outputs: TokenLogprobs) -> dict[int, TokenScores]:
        """Return the scores of a micro-batch by position in the rollout's batch; empty if it only repeats samples of another."""
        if not plan.counts:
            return {}
        return dict(zip([self.positions[i] for i in plan.samples], split_scores(tokens, outputs)))

    def _weights(self, sample: TrainSample) -> FloatArray:
        return token_weights(sample, self.denominators, per_token=self.per_token)


@dataclass(slots=True)
class StepGradients:
    """Results of a rank's passes besides the gradients, which the backend keeps with its parameters."""

    sums: MetricSums
    losses: Tensor
    """[micro-batches] shares of the step's loss."""
    scores: dict[int, TokenScores]
    """By position in the batch's samples."""
    num_tokens: int
    """Tokens of the samples that this rank computed, without repetitions."""
    num_shared_tokens: int = 0
    """Part of `num_tokens` that was not computed again, because another sample of the row had the same tokens."""


def loss_inputs(batch: MicroBatch, outputs: TokenLogprobs, settings: LossSettings) -> LossInputs:
    entropy_matters = settings.entropy_coef != 0 or settings.loss_type == "custom_loss"
    return LossInputs(
        logprobs=outputs.logprobs,
        entropy=outputs.entropy if entropy_matters else outputs.entropy.detach(),
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        weights=batch.weights,
        sample_ids=batch.sample_ids,
        num_samples=len(batch.tokens.response_lengths),
        engine_logprobs=None if settings.loss_type == "sft_loss" else batch.engine_logprobs,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
        share=batch.share,
        total_lengths=[length + 1 for length in batch.tokens.sample_lengths],
        response_lengths=batch.tokens.response_lengths,
    )


def split_scores(tokens: PackedTokens, outputs: TokenLogprobs) -> list[TokenScores]:
    """Split log-probabilities and entropies into samples, in the order of the micro-batch."""
    logprobs, entropy = torch.stack([outputs.logprobs.detach(), outputs.entropy.detach()]).cpu()
    columns = (logprobs.split(tokens.response_lengths), entropy.split(tokens.response_lengths))
    return [TokenScores(logprobs=lp.numpy(), entropy=h.numpy()) for lp, h in zip(*columns)]


def num_choices(samples: Iterable[TrainSample]) -> int:
    return sum(sample.routed_experts.size for sample in samples if sample.routed_experts is not None)


def total(sums: Sequence[MetricSums]) -> MetricSums:
    """Add sums, at least one."""
    return reduce(add, sums)


def losses_of_ranks(gradients: StepGradients | None, num_micro_batches: int, world: World) -> Tensor:
    """Return [ranks, micro-batches] losses on every rank, 0 for a rank that reports none (None). A collective."""
    losses = torch.zeros(world.size, num_micro_batches, device=world.device)
    if gradients is not None:
        losses[world.rank] = gradients.losses
    return world.sum(losses)


def require_finite(losses: Tensor, grad_norm: float, *, optimizer_step: int, flag: str = "--lr", whose: str = "") -> None:
    """Check that all losses and the gradient norm are finite.

    Args:
        losses: [ranks, micro-batches] of all ranks, so that all ranks decide the same.
        grad_norm: norm of the whole gradient.
        optimizer_step: 0-based.
        flag: flag of the learning rate.
        whose: owner of the step if there is more than one model: `of the value model`.

    Raises:
        TrainerError: one of them is not finite; the weights must not be updated.
    """
    bad = (~losses.isfinite()).nonzero().tolist()
    if not bad and math.isfinite(grad_norm):
        return
    where = f"the loss of micro-batch {bad[0][1]} on rank {bad[0][0]}" if bad else f"the gradient norm ({grad_norm})"
    raise TrainerError(
        f"optimizer step {optimizer_step}{whose and f' {whose}'}: {where} is not finite; the weights were left as they are. Resume from "
        f"the last checkpoint with a smaller {flag} or --clip-grad, and check the rollout's samples for tokens of very low "
        "probability."
    )
