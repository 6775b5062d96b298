"""Passes through the value model: with gradients for one optimizer step, without gradients to score samples."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fuligo.trainer.megatron_backend.logprobs import gather_tokens
from fuligo.trainer.megatron_backend.passes import Row, cp_group, head_weight, reports, rows_of, run_rows
from fuligo.trainer.megatron_backend.router import begin_step, take_balance_loss
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import Objective
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients, total
from fuligo.trainer.value_objective import value_objective
from fuligo.types import FloatArray


def compute_value_gradients(
    chunks: Sequence[nn.Module], step: StepShare, settings: MegatronTrainerSettings, device: torch.device, *, clip: float
) -> StepGradients | None:
    """Sum the gradient of the value loss into the stages' buffers, as `gradients.compute_gradients` does; no scores. A collective."""
    samples = step.samples
    rows = rows_of(samples.samples, step.schedule, settings, device, inputs_of=lambda plan: samples.micro_batch(plan, device))
    results: list[Objective] = []

    def loss_of(chunk: nn.Module, row: Row, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert row.inputs is not None
        result = value_objective(_values(chunk, row, hidden), row.inputs, clip)
        results.append(Objective(result.loss.detach(), result.sums))
        # With three values Megatron does not divide the loss by the number of tokens.
        return result.loss, torch.zeros((), dtype=torch.int), {}

    begin_step(chunks, samples.num_tokens)
    run_rows(chunks, rows, step.schedule, loss_of, with_gradients=True)
    take_balance_loss(chunks)  # it trains the routers here as in the policy, where it is also a metric
    if not reports():
        return None
    num_tokens = sum(row.tokens.num_tokens for row in rows if row.plan.counts)
    losses = torch.stack([result.loss for result in results])
    return StepGradients(total([result.sums for result in results]), losses, {}, num_tokens)


@torch.no_grad()
def compute_values(
    chunks: Sequence[nn.Module], share: ScoreShare, settings: MegatronTrainerSettings, device: torch.device
) -> dict[int, FloatArray]:
    """Return [R] values of this replica's samples by position among all, on the rank that `reports`. A collective."""
    rows = rows_of(share.samples, share.schedule, settings, device, inputs_of=lambda _: None)
    found: dict[int, FloatArray] = {}

    def keep(chunk: nn.Module, row: Row, hidden: Tensor, *, non_loss_data: bool = True) -> None:
        del non_loss_data
        values = _values(chunk, row, hidden)
        if reports() and row.plan.counts:
            columns = values.cpu().split(row.tokens.response_lengths)
            found.update((share.positions[i], column.numpy()) for i, column in zip(row.plan.samples, columns, strict=True))

    run_rows(chunks, rows, share.schedule, keep, with_gradients=False)
    return found


def _values(chunk: nn.Module, row: Row, hidden: Tensor) -> Tensor:
    """Return [N] float32 values, on all TP and CP ranks."""
    packed = row.packed
    own = hidden[packed.local_rows].float() @ head_weight(chunk).float().squeeze(0)
    return gather_tokens(own, packed.local_ids, len(row.tokens.targets), cp_group())
