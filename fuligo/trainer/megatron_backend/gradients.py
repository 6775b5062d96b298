"""Passes through the policy or a value model: with gradients for an optimizer step, and without gradients to score samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from fuligo.trainer.batch import MicroBatch, PackedTokens, pack_tokens
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.megatron_backend.logprobs import gather_predictions, vocab_parallel_logprobs
from fuligo.trainer.megatron_backend.packed import PackedRow, pack_row
from fuligo.trainer.megatron_backend.router import begin_step, take_balance_loss
from fuligo.trainer.megatron_backend.routing_replay import LayerReplay, RecordedPart, recorded, recorded_parts, replayed, total_changed
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.weights.local import rank_groups, unwrapped
from fuligo.trainer.mtp import mtp_loss
from fuligo.trainer.objective import Objective, objective
from fuligo.trainer.packing import MicroBatchPlan, MicroBatchSchedule
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients, loss_inputs, num_choices, total
from fuligo.types import FloatArray, TokenScores, TrainSample


@dataclass(slots=True, frozen=True)
class Row:
    """One micro-batch. All pipeline stages hold its tokens, which take little memory."""

    plan: MicroBatchPlan
    tokens: PackedTokens
    packed: PackedRow
    inputs: MicroBatch | None
    """Inputs of the loss; None in a pass without a loss."""


def reports() -> bool:
    """Return whether this rank reports its data-parallel replica's results: TP and CP rank 0 of the last pipeline stage."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return is_first and parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def run_rows(
    chunks: Sequence[nn.Module], rows: list[Row], schedule: MicroBatchSchedule, at_the_end: Callable[..., Any], *, with_gradients: bool
) -> None:
    """Run all rows through all stages with the layout's pipeline schedule; call `at_the_end(chunk, row, hidden)` on the last stage.

    With gradients, `at_the_end` is Megatron's loss function and returns (loss, number of tokens, metrics). Without, Megatron also passes
    `non_loss_data=True`, and the result is ignored.
    """

    def forward_step(waiting: Iterator[Row], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        row = next(waiting)
        return unwrapped(chunk).run(row.packed), partial(at_the_end, chunk, row)

    for chunk in chunks:
        chunk.train(with_gradients)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(rows),
        seq_length=schedule.num_tokens or max(row.packed.num_tokens for row in rows),
        micro_batch_size=1,
        forward_only=not with_gradients,
        collect_non_loss_data=not with_gradients,
    )


def rows_of(share: ScoreShare | StepShare, settings: MegatronTrainerSettings, device: torch.device) -> list[Row]:
    """Pack this rank's part of every micro-batch."""
    cp_rank = rank_groups().context.rank()
    rows: list[Row] = []
    for plan in share.schedule.plans:
        if isinstance(share, StepShare):
            inputs = share.samples.micro_batch(plan, device)
            tokens = inputs.tokens
        else:
            inputs, tokens = None, pack_tokens([share.samples[i] for i in plan.samples], device, shared=plan.shared)
        packed = pack_row(
            tokens,
            settings.layout,
            cp_rank,
            pad_multiple=settings.pad_multiple_tokens,
            num_tokens=share.schedule.num_tokens,
            num_mtp_layers=settings.num_mtp_layers if inputs is not None and settings.mtp.enable_mtp_training else 0,
            counts=plan.counts,
        )
        rows.append(Row(plan, tokens, packed, inputs))
    return rows


def head_weight(chunk: nn.Module) -> Tensor:
    """Return the output layer's weight, after waiting for its gather (`--overlap-param-gather`).

    Megatron waits only in the forward pass of the weight's module, which may not have run.
    """
    weight = unwrapped(chunk).head_weight
    if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook and weight in chunk.param_to_bucket_group:
        chunk.param_to_bucket_group[weight].finish_param_sync()
    return weight


Routing = Literal["own", "recorded", "replayed"]
"""Source of the experts in a pass without gradients: the routers ("own"), the routers, whose choices are recorded ("recorded"), or the
choices recorded in the samples ("replayed")."""


@dataclass(slots=True, frozen=True)
class Scores:
    """Scores of samples on one rank, by position in the list of all replicas' samples."""

    of_tokens: dict[int, FloatArray] = field(default_factory=dict)
    """[R] log-probabilities or values of this replica's samples; empty if this rank does not report (see `reports`)."""
    routing: dict[int, RecordedPart] = field(default_factory=dict)
    """Recorded router choices for this rank's tokens and layers; empty if they were not recorded."""


def compute_gradients(
    chunks: Sequence[nn.Module], step: StepShare, settings: MegatronTrainerSettings, device: torch.device
) -> StepGradients | None:
    """Sum the gradients of the policy's loss, with log-probabilities and entropies as scores; see `sum_gradients`. A collective."""
    scores: dict[int, TokenScores] = {}

    def loss_of(chunk: nn.Module, row: Row, inputs: MicroBatch, hidden: Tensor) -> Objective:
        outputs = response_logprobs(chunk, row, hidden, settings)
        result = objective(loss_inputs(inputs, outputs, settings.loss), settings.loss)
        if reports():
            scores.update(step.samples.scores(row.plan, row.tokens, outputs))
        if not settings.mtp.enable_mtp_training:
            return result
        of_layers = _mtp_loss(chunk, row, inputs, hidden, settings)
        whole = of_layers.detach().clone()
        dist.all_reduce(whole, group=rank_groups().context)
        result.sums.shares["mtp_loss"] = whole
        return Objective(result.loss + settings.mtp.mtp_loss_scaling_factor * of_layers, result.sums)

    return sum_gradients(chunks, step, settings, device, loss_of, scores)


def sum_gradients(
    chunks: Sequence[nn.Module],
    step: StepShare,
    settings: MegatronTrainerSettings,
    device: torch.device,
    loss_of: Callable[[nn.Module, Row, MicroBatch, Tensor], Objective],
    scores: dict[int, TokenScores],
) -> StepGradients | None:
    """Sum the gradients of an optimizer step's loss in the stages' zeroed buffers, and over data-parallel ranks. A collective.

    Return this replica's results on the reporting rank (see `reports`), None on other ranks.

    Args:
        loss_of: function that computes a row's loss on the last stage from the stage, the row, its inputs and its hidden states.
        scores: scores by position in the rollout's batch, which `loss_of` fills in; empty for a value model.
    """
    samples, rows = step.samples, rows_of(step, settings, device)
    objectives: list[Objective] = []

    def run(chunk: nn.Module, row: Row, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert row.inputs is not None
        result = loss_of(chunk, row, row.inputs, hidden)
        objectives.append(Objective(result.loss.detach(), result.sums))
        # With three values and `calculate_per_token_loss`, Megatron does not divide the loss.
        return result.loss, torch.zeros((), dtype=torch.int), {}

    begin_step(chunks, samples.num_tokens)
    replays_routing = settings.routing is not None and samples.num_choices > 0
    with _replayed(chunks, rows, samples.samples, settings) as replays:
        run_rows(chunks, rows, step.schedule, run, with_gradients=True)
    balance_loss = take_balance_loss(chunks)
    groups = rank_groups()
    changed = total_changed(replays.values(), device, [groups.model, groups.context]) if replays_routing else None
    if not reports():
        return None
    sums = total([of_row.sums for of_row in objectives])
    if balance_loss is not None:
        sums.shares["moe_balance_loss"] = balance_loss
    if changed is not None:
        sums.shares["routing_replay_changed"] = changed / samples.num_choices
    counted = [row.tokens for row in rows if row.plan.counts]
    num_tokens = sum(tokens.num_sample_tokens for tokens in counted)
    losses = torch.stack([of_row.loss for of_row in objectives])
    return StepGradients(sums, losses, scores, num_tokens, num_tokens - sum(tokens.num_tokens for tokens in counted))


@torch.no_grad()
def compute_scores(
    chunks: Sequence[nn.Module],
    share: ScoreShare,
    settings: MegatronTrainerSettings,
    device: torch.device,
    scores_of: Callable[[nn.Module, Row, Tensor], Tensor],
    *,
    routing: Routing = "own",
) -> Scores:
    """Score this replica's response tokens; record the routers' choices if requested. A collective.

    Args:
        scores_of: function that computes the [N] scores of a row on the last stage from the stage, the row and its hidden states.
    """
    samples, schedule, positions = share.samples, share.schedule, share.positions
    rows = rows_of(share, settings, device)
    scores: dict[int, FloatArray] = {}

    def keep(chunk: nn.Module, row: Row, hidden: Tensor, *, non_loss_data: bool = True) -> None:
        del non_loss_data
        of_row = scores_of(chunk, row, hidden)
        if reports() and row.plan.counts:
            columns = of_row.cpu().split(row.tokens.response_lengths)
            scores.update((positions[i], column.numpy()) for i, column in zip(row.plan.samples, columns, strict=True))

    if routing == "recorded":
        assert settings.routing is not None
        with recorded(chunks, settings.routing) as records:
            run_rows(chunks, rows, schedule, keep, with_gradients=False)
        own = [(row.packed, row.tokens, [positions[i] for i in row.plan.samples if row.plan.counts]) for row in rows]
        return Scores(scores, recorded_parts(records, own, rank_groups().tensor, sequence_parallel=settings.layout.sequence_parallel))
    with _replayed(chunks, rows, samples if routing == "replayed" else [], settings):
        run_rows(chunks, rows, schedule, keep, with_gradients=False)
    return Scores(scores)


def _replayed(
    chunks: Sequence[nn.Module], rows: Sequence[Row], samples: Sequence[TrainSample], settings: MegatronTrainerSettings
) -> AbstractContextManager[dict[int, LayerReplay]]:
    """Inside the block, replay the routing that the samples have recorded; do nothing if no sample has a record."""
    if settings.routing is None or not num_choices(samples):
        return nullcontext({})
    of_rows = [(row.packed, row.tokens, [samples[i] for i in row.plan.samples]) for row in rows]
    return replayed(chunks, of_rows, settings.routing, rank_groups().tensor)


def response_logprobs(chunk: nn.Module, row: Row, hidden: Tensor, settings: MegatronTrainerSettings) -> TokenLogprobs:
    """Return the [N] log-probabilities and entropies of the response tokens, on all TP and CP ranks."""
    packed, targets = row.packed, row.tokens.targets
    own = _logprobs(hidden[packed.local_rows], head_weight(chunk), targets[packed.local_ids], settings, settings.temperature)
    return gather_predictions(own, packed.local_ids, len(targets), rank_groups().context)


def _logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, settings: MegatronTrainerSettings, temperature: float) -> TokenLogprobs:
    return vocab_parallel_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_tokens=settings.chunk_tokens,
        num_vocab=settings.model_flags["vocab_size"],
        tp_group=rank_groups().tensor,
    )


def _mtp_loss(chunk: nn.Module, row: Row, inputs: MicroBatch, hidden: Tensor, settings: MegatronTrainerSettings) -> Tensor:
    """Return this context-parallel rank's part of the MTP layers' loss. `hidden`: [(1 + K) * L, E] result of `PolicyModel.run`."""
    packed, targets = row.packed, row.tokens.targets
    weight = head_weight(chunk) if settings.mtp.mtp_joint_training else head_weight(chunk).detach()
    states = hidden.split(packed.input_ids.size(1))[1:]
    logprobs = (
        _logprobs(of_layer[later.local_rows], weight, targets[later.local_ids], settings, temperature=1.0).logprobs
        for of_layer, later in zip(states, packed.later, strict=True)
    )
    return mtp_loss(logprobs, packed.later, inputs.weights)
