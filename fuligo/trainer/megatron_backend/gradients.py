"""Passes through the policy: with gradients for an optimizer step, and without gradients to score samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from fuligo.trainer.batch import MicroBatch, PackedTokens, pack_tokens
from fuligo.trainer.logprobs import TokenLogprobs
from fuligo.trainer.megatron_backend.learner import wait_for
from fuligo.trainer.megatron_backend.logprobs import gather_predictions, vocab_parallel_logprobs
from fuligo.trainer.megatron_backend.mtp import mtp_logprobs
from fuligo.trainer.megatron_backend.packed import PackedRow, pack_row
from fuligo.trainer.megatron_backend.router import begin_step, take_balance_loss
from fuligo.trainer.megatron_backend.routing_replay import LayerReplay, RecordedPart, recorded, recorded_parts, replayed, total_changed
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.weights.local import unwrapped
from fuligo.trainer.metric_sums import MetricSums
from fuligo.trainer.mtp import mtp_loss
from fuligo.trainer.objective import Objective, objective
from fuligo.trainer.packing import MicroBatchPlan, MicroBatchSchedule
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients, loss_inputs, num_choices, split_scores, total
from fuligo.types import TokenScores, TrainSample


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


def rows_of(
    samples: Sequence[TrainSample],
    schedule: MicroBatchSchedule,
    settings: MegatronTrainerSettings,
    device: torch.device,
    *,
    inputs_of: Callable[[MicroBatchPlan], MicroBatch | None],
) -> list[Row]:
    """Pack this rank's part of every micro-batch. `inputs_of` returns a micro-batch's loss inputs, or None in a pass without a loss."""
    cp_rank = parallel_state.get_context_parallel_rank()
    rows: list[Row] = []
    for plan in schedule.plans:
        inputs = inputs_of(plan)
        tokens = pack_tokens([samples[i] for i in plan.samples], device, shared=plan.shared) if inputs is None else inputs.tokens
        packed = pack_row(
            tokens,
            settings.layout,
            cp_rank,
            pad_multiple=settings.pad_multiple_tokens,
            num_tokens=schedule.num_tokens,
            num_mtp_layers=settings.num_mtp_layers if inputs is not None and settings.mtp.enable_mtp_training else 0,
            counts=plan.counts,
        )
        rows.append(Row(plan, tokens, packed, inputs))
    return rows


def step_gradients(rows: Sequence[Row], objectives: Sequence[Objective], scores: dict[int, TokenScores]) -> StepGradients:
    """Return the results of a step whose rows had these losses. `num_shared` are tokens not computed again because samples share them."""
    counted = [row.tokens for row in rows if row.plan.counts]
    num_tokens = sum(tokens.num_sample_tokens for tokens in counted)
    losses = torch.stack([of_row.loss for of_row in objectives])
    num_shared = num_tokens - sum(tokens.num_tokens for tokens in counted)
    return StepGradients(total([of_row.sums for of_row in objectives]), losses, scores, num_tokens, num_shared)


def head_weight(chunk: nn.Module) -> Tensor:
    weight = unwrapped(chunk).head_weight
    if isinstance(chunk, DistributedDataParallel):
        wait_for(chunk, weight)
    return weight


def tp_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def model_group() -> dist.ProcessGroup:
    """Return the group of all TP and PP ranks of a replica with the same context-parallel rank."""
    return cast(dist.ProcessGroup, parallel_state.get_model_parallel_group())


def cp_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


Routing = Literal["own", "recorded", "replayed"]
"""Source of the experts in a pass without gradients: the routers ("own"), the routers, whose choices are recorded ("recorded"), or the
choices recorded in the samples ("replayed")."""


@dataclass(slots=True, frozen=True)
class Scores:
    """Scores of samples on one rank, by position in the list of all replicas' samples."""

    of_tokens: dict[int, TokenScores] = field(default_factory=dict)
    """Log-probabilities and entropies of this replica's samples; empty if this rank does not report (see `reports`)."""
    routing: dict[int, RecordedPart] = field(default_factory=dict)
    """Recorded router choices for this rank's tokens and layers; empty if they were not recorded."""


def compute_gradients(
    chunks: Sequence[nn.Module], step: StepShare, settings: MegatronTrainerSettings, device: torch.device
) -> StepGradients | None:
    """Compute the gradients of an optimizer step's loss in the stages' zeroed buffers, summed over data-parallel ranks. A collective.

    Return this replica's results on the reporting rank (see `reports`), None on other ranks.
    """
    samples = step.samples
    rows = rows_of(samples.samples, step.schedule, settings, device, inputs_of=lambda plan: samples.micro_batch(plan, device))
    objectives: list[Objective] = []
    scores: dict[int, TokenScores] = {}

    def loss_of(chunk: nn.Module, row: Row, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert row.inputs is not None
        outputs = _logprobs(chunk, row, hidden, settings)
        result = objective(loss_inputs(row.inputs, outputs, settings.loss), settings.loss)
        loss = result.loss
        if settings.mtp.enable_mtp_training:
            loss = loss + settings.mtp.mtp_loss_scaling_factor * _mtp_loss(chunk, row, hidden, settings, result.sums)
        objectives.append(Objective(loss.detach(), result.sums))
        if reports():
            scores.update(samples.scores(row.plan, row.tokens, outputs))
        # With three values and `calculate_per_token_loss`, Megatron does not divide the loss.
        return loss, torch.zeros((), dtype=torch.int), {}

    begin_step(chunks, samples.num_tokens)
    with _replayed(chunks, rows, samples.samples, settings) as replays:
        run_rows(chunks, rows, step.schedule, loss_of, with_gradients=True)
    balance_loss = take_balance_loss(chunks)
    changed = total_changed(replays.values(), device, [model_group(), cp_group()]) if samples.num_choices else None
    if not reports():
        return None
    gradients = step_gradients(rows, objectives, scores)
    if balance_loss is not None:
        gradients.sums.shares["moe_balance_loss"] = balance_loss
    if changed is not None:
        gradients.sums.shares["routing_replay_changed"] = changed / samples.num_choices
    return gradients


@torch.no_grad()
def compute_scores(
    chunks: Sequence[nn.Module], share: ScoreShare, settings: MegatronTrainerSettings, device: torch.device, *, routing: Routing = "own"
) -> Scores:
    """Compute log-probabilities and entropies of this replica's response tokens; record the routers' choices if requested. A collective."""
    samples, schedule, positions = share.samples, share.schedule, share.positions
    rows = rows_of(samples, schedule, settings, device, inputs_of=lambda _: None)
    scores: dict[int, TokenScores] = {}

    def keep(chunk: nn.Module, row: Row, hidden: Tensor, *, non_loss_data: bool = True) -> None:
        del non_loss_data
        outputs = _logprobs(chunk, row, hidden, settings)
        if reports() and row.plan.counts:
            scores.update(zip([positions[i] for i in row.plan.samples], split_scores(row.tokens, outputs)))

    if routing == "recorded":
        assert settings.routing is not None
        with recorded(chunks, settings.routing) as records:
            run_rows(chunks, rows, schedule, keep, with_gradients=False)
        own = [(row.packed, row.tokens, [positions[i] for i in row.plan.samples if row.plan.counts]) for row in rows]
        return Scores(scores, recorded_parts(records, own, tp_group(), sequence_parallel=settings.layout.sequence_parallel))
    with _replayed(chunks, rows, samples if routing == "replayed" else [], settings):
        run_rows(chunks, rows, schedule, keep, with_gradients=False)
    return Scores(scores)


def _replayed(
    chunks: Sequence[nn.Module], rows: Sequence[Row], samples: Sequence[TrainSample], settings: MegatronTrainerSettings
) -> AbstractContextManager[dict[int, LayerReplay]]:
    """Replay the routing recorded in the samples inside the block; do nothing if no sample has a record."""
    if settings.routing is None or not num_choices(samples):
        return nullcontext({})
    of_rows = [[samples[i] for i in row.plan.samples] for row in rows]
    return replayed(chunks, [row.packed for row in rows], [row.tokens for row in rows], of_rows, settings.routing, tp_group())


def _logprobs(chunk: nn.Module, row: Row, hidden: Tensor, settings: MegatronTrainerSettings) -> TokenLogprobs:
    """Return the [N] log-probabilities and entropies of the response tokens, on all TP and CP ranks."""
    packed = row.packed
    local = vocab_parallel_logprobs(
        hidden[packed.local_rows],
        head_weight(chunk),
        row.tokens.targets[packed.local_ids],
        temperature=settings.temperature,
        chunk_tokens=settings.chunk_tokens,
        num_vocab=settings.model_flags["vocab_size"],
        tp_group=tp_group(),
    )
    return gather_predictions(local, packed.local_ids, len(row.tokens.targets), cp_group())


def _mtp_loss(chunk: nn.Module, row: Row, hidden: Tensor, settings: MegatronTrainerSettings, sums: MetricSums) -> Tensor:
    """Return this context-parallel rank's part of the MTP layers' loss, and add the whole loss to the metrics `sums`."""
    assert row.inputs is not None
    head = head_weight(chunk)
    logprobs = mtp_logprobs(
        hidden,
        head if settings.mtp.mtp_joint_training else head.detach(),
        row.packed,
        row.tokens.targets,
        chunk_tokens=settings.chunk_tokens,
        num_vocab=settings.model_flags["vocab_size"],
        tp_group=tp_group(),
    )
    loss = mtp_loss(logprobs, row.packed.later, row.inputs.weights)
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=cp_group())
    sums.shares["mtp_loss"] = whole
    return loss
