"""Triton kernels for MoE experts whose result for a token depends only on that token, to the last bit.

Trainer and SGLang run these same kernels, as with `invariant_kernels`; the engine's processes lack fuligo, so this file imports only
torch and triton. An expert's rows are computed in tiles of at least 64 rows, and each sum runs from the first input to the last, so a
token's result does not depend on the tokens that share its tile. The outputs of a token's experts are added in the order of the router's
choices.

No call waits for the GPU, and all shapes follow from the number of tokens, so that CUDA graphs can capture these calls.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

GROUPED_TILES = 8
"""Number of row tiles computed one after another for the same columns, so that weights stay in the L2 cache."""
FEWEST_EXPERTS = 256
"""Smallest padded size of the vectors over experts in the grouped product: at least one element for each thread of a program."""
SORTED_AT_ONCE = 64
"""Number of choices per program of the sort kernel."""
COUNTED_AT_ONCE = 128
"""Number of choices per step with which a program of the sort kernel compares its own choices."""
MOST_COUNTED = 16_384
"""Largest number of choices for which comparing all pairs is faster than sorting: 2,048 tokens with 8 experts each."""
COMBINED_COLUMNS = 1024
"""Number of columns per program of the kernel that adds the outputs of a token's experts."""
ROUND_EACH = {"enable_fp_fusion": False}
"""Launch option of kernels that round intermediate results; with fusion, LLVM would skip that rounding."""


class Rows(NamedTuple):
    """Tokens sorted by expert: one row for each choice of a token."""

    starts: Tensor
    """[E + 1] int32, the first row of each expert, and the number of rows."""
    tokens: Tensor
    """[T * K] int32, the token of each row."""
    places: Tensor
    """[T * K] int32, the row of each choice, token by token."""


class Tile(NamedTuple):
    """Part of a matrix product that a program computes."""

    rows: int
    columns: int
    inputs: int
    """Number of inputs per step."""
    warps: int
    stages: int
    """Number of pipeline stages: steps whose inputs are loaded ahead."""


@triton.jit
def _route_kernel(
    logits, weights, chosen, num_experts, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    left = tl.load(logits + row * num_experts + experts, mask=experts < num_experts, other=float("-inf")).to(tl.float32)
    peak = tl.max(left, 0)
    total = tl.sum(tl.exp(left - peak), 0)
    shares = tl.zeros((SLOTS,), dtype=tl.float32)
    numbers = tl.zeros((SLOTS,), dtype=tl.int32)
    added = 0.0
    for slot in tl.static_range(TOP_K):
        highest = tl.max(left, 0)
        expert = tl.min(tl.where(left == highest, experts, num_experts - 1), 0)  # the first of equal ones; in bounds even for NaN
        share = tl.exp(highest - peak) / total
        added += share
        shares = tl.where(slots == slot, share, shares)
        numbers = tl.where(slots == slot, expert, numbers)
        left = tl.where(experts == expert, float("-inf"), left)
    if RENORMALIZE:
        shares = shares / added
    at = row * TOP_K + slots
    tl.store(weights + at, shares.to(logits.dtype.element_ty).to(tl.float32), mask=slots < TOP_K)
    tl.store(chosen + at, numbers, mask=slots < TOP_K)


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts with the highest logits for each token; among equal logits, the lowest index.

    Args:
        logits: [T, E] in half precision.
        top_k: number K of experts per token.
        renormalize: scale each token's weights to a sum of 1.

    Returns:
        Weights [T, K] float32, the softmax over all experts rounded to the logits' type, as transformers does; expert indices [T, K] int32.
    """
    logits = logits.contiguous()
    weights = torch.empty(len(logits), top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(len(logits), top_k, dtype=torch.int32, device=logits.device)
    if len(logits):
        num_experts = logits.size(1)
        _route_kernel[(len(logits),)](
            logits, weights, chosen, num_experts, TOP_K=top_k, RENORMALIZE=renormalize,
            EXPERTS=max(32, triton.next_power_of_2(num_experts)), SLOTS=triton.next_power_of_2(top_k), num_warps=1, **ROUND_EACH,
        )  # fmt: skip
    return weights, chosen


@triton.jit
def _sort_kernel(chosen, starts, tokens, places, num_choices, num_experts, TOP_K: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr):
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)  # all choices, then all experts, to find their first rows
    is_choice = own < num_choices
    expert = tl.where(is_choice, tl.load(chosen + own, mask=is_choice, other=0), own - num_choices)
    equal_before = tl.where(is_choice, own, 0)
    place = tl.zeros((OWN,), dtype=tl.int32)
    for start in range(0, num_choices, OTHERS):
        other = start + tl.arange(0, OTHERS)
        of_other = tl.load(chosen + other, mask=other < num_choices, other=1 << 30)
        is_equal = (of_other[None, :] == expert[:, None]) & (other[None, :] < equal_before[:, None])
        place += tl.sum(((of_other[None, :] < expert[:, None]) | is_equal).to(tl.int32), 1)
    tl.store(starts + own - num_choices, place, mask=(own >= num_choices) & (own <= num_choices + num_experts))
    tl.store(places + own, place, mask=is_choice)
    tl.store(tokens + place, own // TOP_K, mask=is_choice)


def sort_by_expert(chosen: Tensor, num_experts: int) -> Rows:
    """Sort the choices [T, K] int32 by expert; the rows of an expert stay in token order."""
    (num_tokens, top_k), device = chosen.shape, chosen.device
    num_choices, flat = num_tokens * top_k, chosen.flatten()
    if num_choices > MOST_COUNTED:
        numbers, order = flat.sort(stable=True)
        starts = torch.searchsorted(numbers, torch.arange(num_experts + 1, dtype=numbers.dtype, device=device), out_int32=True)
        places = torch.empty_like(flat)
        places[order] = torch.arange(num_choices, dtype=places.dtype, device=device)
        return Rows(starts, (order // top_k).int(), places)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tokens, places = torch.empty_like(flat), torch.empty_like(flat)
    _sort_kernel[(triton.cdiv(num_choices + num_experts + 1, SORTED_AT_ONCE),)](
        flat, starts, tokens, places, num_choices, num_experts, TOP_K=top_k, OWN=SORTED_AT_ONCE, OTHERS=COUNTED_AT_ONCE, num_warps=4
    )
    return Rows(starts, tokens, places)


@triton.jit
def _grouped_linear_kernel(
    rows, weight, starts, out, num_outputs, num_inputs, num_experts,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    first = tl.load(starts + experts, mask=experts < num_experts, other=0)
    end = tl.load(starts + experts + 1, mask=experts < num_experts, other=0)
    tiles = (end - first + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    row_tiles, column_tiles = tl.sum(tiles, 0), tl.cdiv(num_outputs, COLUMNS)
    program = tl.program_id(0)
    if program >= row_tiles * column_tiles:
        return
    group = program // (GROUPED * column_tiles)
    group_size = min(row_tiles - group * GROUPED, GROUPED)
    row_tile = group * GROUPED + (program % (GROUPED * column_tiles)) % group_size
    column = ((program % (GROUPED * column_tiles)) // group_size) * COLUMNS
    expert = tl.sum((tiles_end <= row_tile).to(tl.int32), 0)
    is_own = experts == expert
    own_end = tl.sum(tl.where(is_own, end, 0), 0)
    row = tl.sum(tl.where(is_own, first + (row_tile - (tiles_end - tiles)) * ROWS, 0), 0)
    weight_row = expert * num_outputs + column
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        total = tl.dot(rows.load([row, start]), weight.load([weight_row, start]).T, total)  # zeros beyond the inputs' end
    own_rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    out_at = out + own_rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(own_rows[:, None] < own_end) & (columns[None, :] < num_outputs))


def grouped_linear(rows: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Return [R, N], each row times the transposed matrix of its expert, rounded once.

    Args:
        rows: [R, K] sorted by expert, in half precision; the row stride is a multiple of 8 elements, as in `weight`.
        weight: [E, N, K] of the same type; the last axis is contiguous, and the first two can be flattened.
        starts: [E + 1] int32, the first row of each expert.
    """
    (num_rows, num_inputs), (num_experts, num_outputs, _) = rows.shape, weight.shape
    out = torch.empty(num_rows, num_outputs, dtype=rows.dtype, device=rows.device)
    if num_rows:
        tile = _tile(num_rows // num_experts)
        most_tiles = triton.cdiv(num_rows, tile.rows) + min(num_experts, num_rows)  # each expert may end with a partial tile
        _grouped_linear_kernel[(most_tiles * triton.cdiv(num_outputs, tile.columns),)](
            TensorDescriptor.from_tensor(rows, [tile.rows, tile.inputs]),
            TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.inputs]),
            starts, out, num_outputs, num_inputs, num_experts, EXPERTS=max(FEWEST_EXPERTS, triton.next_power_of_2(num_experts)),
            ROWS=tile.rows, COLUMNS=tile.columns, INPUTS=tile.inputs, GROUPED=GROUPED_TILES, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _tile(rows_per_expert: int) -> Tile:
    """Return the tile for a mean number of rows per expert; with few rows, most time is spent loading weights."""
    if rows_per_expert < 64:
        return Tile(64, 128, 64, 4, 4)
    return Tile(128, 128, 64, 8, 3) if rows_per_expert < 512 else Tile(128, 256, 64, 8, 4)


@triton.jit
def _combine_kernel(rows, places, weights, out, num_columns, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(places + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + choice)
        total += weight * tl.load(rows + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * num_columns + columns, total.to(out.dtype.element_ty), mask=inside)


def combine(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums [T, N] of each token's rows, added in the order of its choices and rounded once.

    Args:
        rows: [T * K, N] outputs of the experts.
        places: [T * K] row of each choice.
        weights: [T, K] float32 factor of each choice.
    """
    (num_tokens, top_k), num_columns = weights.shape, rows.size(1)
    out = torch.empty(num_tokens, num_columns, dtype=rows.dtype, device=rows.device)
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(num_columns, COMBINED_COLUMNS))](
            rows, places, weights, out, num_columns, TOP_K=top_k, COLUMNS=COMBINED_COLUMNS, num_warps=4, **ROUND_EACH
        )
    return out


class Experts(NamedTuple):
    """Results of `experts`; all but `out` are for the backward pass."""

    out: Tensor
    """[T, H]"""
    rows: Rows
    gate_up: Tensor
    """[T * K, 2 * I] inputs of the activation."""


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    swiglu: Callable[[Tensor, Tensor], Tensor],
    ranks: int = 1,
) -> Experts:
    """Compute the SwiGLU experts of an MoE layer.

    Args:
        x: [T, H] in half precision.
        gate_up: [E, 2 * I, H]
        down: [E, H, I]
        weights: [T, K] float32
        chosen: [T, K] int32, distinct experts for each token.
        swiglu: `invariant_kernels.swiglu`.
        ranks: tensor-parallel GPUs of the engine whose rounding is reproduced; each has I / ranks inputs of `down`.
    """
    rows = sort_by_expert(chosen, len(gate_up))
    hidden = grouped_linear(x.index_select(0, rows.tokens), gate_up, rows.starts)
    active = swiglu(*hidden.chunk(2, -1))
    share = active.size(1) // ranks
    parts = zip(active.split(share, 1), down.split(share, 2), strict=True)
    first, *more = (combine(grouped_linear(some, weight, rows.starts), rows.places, weights) for some, weight in parts)
    return Experts(sum(more, first), rows, hidden)
