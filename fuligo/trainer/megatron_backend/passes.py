"""Passes of packed rows through the stages of a model, in Megatron's schedules.

Rows of a step differ in length, and pipeline stages send each other the lengths. Rows are padded to the longest only if experts' tokens
are all-gathered.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from fuligo.trainer.batch import MicroBatch, PackedTokens, pack_tokens
from fuligo.trainer.megatron_backend.learner import wait_for
from fuligo.trainer.megatron_backend.packed import PackedRow, pack_row
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.weights.local import unwrapped
from fuligo.trainer.packing import MicroBatchPlan, MicroBatchSchedule
from fuligo.types import TrainSample


@dataclass(slots=True, frozen=True)
class Row:
    """One micro-batch; all stages hold its tokens, which are few bytes."""

    plan: MicroBatchPlan
    tokens: PackedTokens
    packed: PackedRow
    inputs: MicroBatch | None
    """Inputs of the loss; None without a loss."""


def reports() -> bool:
    """Return whether this rank reports the last stage's results for its data-parallel replica."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return is_first and parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def run_rows(
    chunks: Sequence[nn.Module], rows: list[Row], schedule: MicroBatchSchedule, at_the_end: Callable[..., Any], *, with_gradients: bool
) -> None:
    """Run all rows through all stages, in the schedule of the layout; call `at_the_end` on the last with chunk, row and hidden states."""

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
            num_mtp_layers=settings.mtp.num_layers if inputs is not None and settings.mtp.trained else 0,
            counts=plan.counts,
        )
        rows.append(Row(plan, tokens, packed, inputs))
    return rows


def token_counts(rows: Sequence[Row]) -> tuple[int, int]:
    """Return how many tokens these rows' samples have, and how many were not computed again because samples share them."""
    counted = [row.tokens for row in rows if row.plan.counts]
    num_tokens = sum(tokens.num_sample_tokens for tokens in counted)
    return num_tokens, num_tokens - sum(tokens.num_tokens for tokens in counted)


def head_weight(chunk: nn.Module) -> Tensor:
    weight = unwrapped(chunk).head_weight
    if isinstance(chunk, DistributedDataParallel):
        wait_for(chunk, weight)
    return weight


def tp_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def model_group() -> dist.ProcessGroup:
    """Return the group of all TP and PP ranks of a replica with the same context-parallel part."""
    return cast(dist.ProcessGroup, parallel_state.get_model_parallel_group())


def cp_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())
