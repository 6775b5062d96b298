"""Parts of an optimizer step before and after the model's passes, shared by all backends."""

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
    """Counts of optimizer steps and rollouts so far."""

    num_optimizer_steps: int = 0
    """Number of optimizer steps, including skipped ones: the position in the learning-rate schedule."""
    num_rollouts: int = 0
    num_skipped_steps: int = 0
    """Number of optimizer steps that were skipped because all advantages of their samples were 0."""

    @property
    def num_updates(self) -> int:
        """Number of updates of the weights: AdamW's step counter. Before the first update, the optimizer has no moments."""
        return self.num_optimizer_steps - self.num_skipped_steps

    def skip_step(self) -> None:
        """Count a skipped optimizer step."""
        self.num_optimizer_steps += 1
        self.num_skipped_steps += 1


@dataclass(slots=True, frozen=True)
class StepSamples:
    """Samples of one optimizer step (all of them, or one replica's share), with counts over the whole step."""

    positions: Sequence[int]
    """Positions of `samples` in the rollout's batch."""
    samples: list[TrainSample]
    denominators: StepDenominators
    per_token: bool
    """`LossSettings.per_token`."""
    num_tokens: int
    """Number of tokens of the whole step that go through the model: all but the last of each trained sample."""
    num_choices: int
    """Number of expert choices recorded in `routed_experts` for all trained samples of the step."""

    @classmethod
    def of(cls, batch: TrainBatch, step: int, settings: LossSettings, positions: Sequence[int] | None = None) -> Self:
        """Return the samples of an optimizer step at `positions` of the batch (None: all); denominators always cover the whole step."""
        positions = batch.steps[step] if positions is None else positions
        samples = [batch.samples[i] for i in positions]
        num_tokens = sum(len(sample.tokens) - 1 for sample in samples)
        return cls(positions, samples, step_denominators(batch, step), settings.per_token, num_tokens, num_choices(samples))

    def select(self, chosen: Sequence[int]) -> Self:
        return replace(self, positions=[self.positions[i] for i in chosen], samples=[self.samples[i] for i in chosen])

    @property
    def weights(self) -> list[FloatArray]:
        """[R] weights of each sample's response tokens in the loss of the whole step."""
        return [self._weights(sample) for sample in self.samples]

    def micro_batch(self, plan: MicroBatchPlan, device: torch.device) -> MicroBatch:
        chosen = [self.samples[i] for i in plan.samples]
        share = self.denominators.share(per_token=self.per_token)
        weights = [self._weights(sample) for sample in chosen]
        return micro_batch(chosen, weights, device, counts=plan.counts, share=share, shared=plan.shared)

    def scores(self, plan: MicroBatchPlan, tokens: PackedTokens, outputs: TokenLogprobs) -> dict[int, TokenScores]:
        """Return the scores of a micro-batch by position in the rollout's batch; empty if the micro-batch is a repetition."""
        if not plan.counts:
            return {}
        logprobs, entropy = torch.stack([outputs.logprobs.detach(), outputs.entropy.detach()]).cpu()
        columns = zip(plan.samples, logprobs.split(tokens.response_lengths), entropy.split(tokens.response_lengths), strict=True)
        return {self.positions[i]: TokenScores(logprobs=lp.numpy(), entropy=h.numpy()) for i, lp, h in columns}

    def _weights(self, sample: TrainSample) -> FloatArray:
        return token_weights(sample, self.denominators, per_token=self.per_token)


@dataclass(slots=True)
class StepGradients:
    """Results of a rank's forward and backward passes, apart from the gradients, which stay with the backend's parameters."""

    sums: MetricSums
    losses: Tensor
    """[micro-batches] share of each micro-batch in the step's loss."""
    scores: dict[int, TokenScores]
    """Scores by position in the batch's samples."""
    num_tokens: int
    """Number of tokens of this rank's samples; micro-batches that are repeated as padding do not count."""
    num_shared_tokens: int = 0
    """Number of these tokens that were not computed again, because they belong to a prefix shared with another sample of the row."""


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


def num_choices(samples: Iterable[TrainSample]) -> int:
    return sum(sample.routed_experts.size for sample in samples if sample.routed_experts is not None)


def total(sums: Sequence[MetricSums]) -> MetricSums:
    """Return the sum of at least one `MetricSums`."""
    return reduce(add, sums)


def losses_of_ranks(gradients: StepGradients | None, num_micro_batches: int, world: World) -> Tensor:
    """Gather the losses of all ranks into [ranks, micro-batches]; 0 for a rank whose `gradients` are None. A collective."""
    losses = torch.zeros(world.size, num_micro_batches, device=world.device)
    if gradients is not None:
        losses[world.rank] = gradients.losses
    return world.sum(losses)


def require_finite(losses: Tensor, grad_norm: float, *, optimizer_step: int, flag: str = "--lr", whose: str = "") -> None:
    """Raise TrainerError if a loss or the norm of the whole gradient is not finite; the weights must then not be updated.

    Args:
        losses: [ranks, micro-batches] losses of all ranks, so that all ranks decide alike.
        flag: flag of the learning rate, for the message.
        whose: model for the message if there is more than one, such as `of the value model`.
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
