"""Triton kernels whose result for a row depends only on that row, to the last bit, whatever else is in the call.

Trainer and SGLang run these same kernels (`engines/sglang/exact` loads this file into the engine's processes, which lack fuligo, so it
imports only torch and triton). A sum is never split over programs and always starts at the first term: inputs of a matrix product, keys
from the start of the sequence, logits from the first token. Masked terms are exact zeros. The number of rows determines only the tile
size and which program computes a row. All tiles have at least 64 rows, since smaller ones use other tensor-core instructions.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = 64
"""Number of rows of the smallest tile, as in one matrix instruction of a warp group on Hopper."""
KEYS = 64
"""Number of keys per step of attention."""
GROUPED_TILES = 8
"""Number of row tiles computed one after another for the same columns, so that weights stay in the L2 cache."""
SWIGLU_COLUMNS = 1024
"""Number of columns per program of the SwiGLU kernels."""
LOGITS = 4096
"""Number of logits per step of a row's sum."""
ROUND_EACH = {"enable_fp_fusion": False}
"""Launch option of kernels that round intermediate results; with fusion, LLVM would skip that rounding."""


class Tile(NamedTuple):
    """Part of a matrix product that a program computes at a time; every tile sums over the inputs in the same order."""

    rows: int
    columns: int
    inputs: int
    """Number of inputs per step."""
    warps: int
    stages: int
    """Number of pipeline stages: steps whose inputs are loaded ahead."""


@triton.jit
def _linear_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_inputs, num_programs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, num_programs, flatten=True):
        group = tile // (GROUPED * column_tiles)
        group_size = min(row_tiles - group * GROUPED, GROUPED)
        row = (group * GROUPED + (tile % (GROUPED * column_tiles)) % group_size) * ROWS
        column = ((tile % (GROUPED * column_tiles)) // group_size) * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, num_inputs, INPUTS):
            total = tl.dot(x.load([row, start]), weight.load([column, start]).T, total)  # zeros beyond the ends
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[None, :]
        out_at = out + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=(rows[:, None] < num_rows) & (columns[None, :] < num_outputs))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, ranks: int = 1) -> Tensor:
    """Return x @ weight.T + bias, [..., N], rounded to `dtype` once, or as tensor-parallel GPUs that split the inputs round it.

    Args:
        x: [..., K] in half precision, K / `ranks` a multiple of 8.
        weight: [N, K] of the same type.
        bias: [N]; None: no bias.
        ranks: number of tensor-parallel GPUs, 1 or 2. Each rounds its product (the first after adding the bias), and their sum is rounded.
    """
    flat = x.reshape(-1, x.size(-1)).contiguous()
    share = flat.size(1) // ranks
    first, *more = (
        _product(rows, part, bias if number == 0 else None, dtype)
        for number, (rows, part) in enumerate(zip(flat.split(share, 1), weight.split(share, 1), strict=True))
    )
    return sum(more, first).view(*x.shape[:-1], weight.size(0))


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (num_rows, num_inputs), num_outputs = rows.shape, weight.size(0)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=rows.device)
    if num_rows:
        tile = _tile(num_rows, dtype)
        num_programs = min(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.columns), _num_processors(rows.device))
        _linear_kernel[(num_programs,)](
            TensorDescriptor.from_tensor(rows, [tile.rows, tile.inputs]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.inputs]),
            bias, out, num_rows, num_outputs, num_inputs, num_programs, HAS_BIAS=bias is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, INPUTS=tile.inputs, GROUPED=GROUPED_TILES, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _tile(num_rows: int, dtype: torch.dtype) -> Tile:
    """Return the fastest tile for the shapes of Qwen3-4B on an H100, among those that fit its shared memory."""
    if num_rows <= 64:
        return Tile(64, 32, 128, 4, 5)
    if dtype == torch.float32:
        return Tile(128, 128, 64, 4, 4)
    if num_rows <= 384:
        return Tile(128, 64, 128, 4, 4)
    return Tile(128, 128, 128, 8, 3) if num_rows < 1024 else Tile(128, 256, 64, 8, 4)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _rms_norm_kernel(x, weight, out, inverse_rms, num_rows, num_columns, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column, is_row = columns < num_columns, rows < num_rows
    at, inside = rows[:, None] * num_columns + columns[None, :], is_row[:, None] & is_column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / num_columns + eps)
    normed = (values * inverse[:, None]).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(inverse_rms + rows, inverse, mask=is_row)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return weight * x / rms(x) over the last axis, [..., K], and 1 / rms(x), [..., 1] float32; x / rms(x) is rounded to x's dtype."""
    flat = x.reshape(-1, x.size(-1)).contiguous()
    out = torch.empty_like(flat)
    inverse_rms = torch.empty(len(flat), dtype=torch.float32, device=x.device)
    if len(flat):
        columns = triton.next_power_of_2(flat.size(1))
        rows = max(1, 2048 // columns)  # several short rows, such as heads, per program
        _rms_norm_kernel[(triton.cdiv(len(flat), rows),)](
            flat, weight, out, inverse_rms, len(flat), flat.size(1), eps, ROWS=rows, COLUMNS=columns, num_warps=4, **ROUND_EACH
        )
    return out.view(x.shape), inverse_rms.view(*x.shape[:-1], 1)


@triton.jit
def _attention_kernel(
    query, key, value, out, query_starts, key_starts, slots, scale,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, out_stride, out_head_stride,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key_head, sequence = tl.program_id(1), tl.program_id(2)
    query_start, key_start = tl.load(query_starts + sequence), tl.load(key_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - query_start
    num_keys = tl.load(key_starts + sequence + 1) - key_start
    first = tl.program_id(0) * (ROWS // GROUP)
    if first >= num_queries:
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = first + rows // GROUP
    head = key_head * GROUP + rows % GROUP
    is_row = (rows < (ROWS // GROUP) * GROUP) & (token < num_queries)
    inside = dims < SIZE
    query_at = query + (query_start + token).to(tl.int64)[:, None] * query_stride + head[:, None] * query_head_stride + dims[None, :]
    q = tl.load(query_at, mask=is_row[:, None] & inside[None, :], other=0.0)
    position = num_keys - num_queries + token
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    weighted = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    end = min(num_keys, num_keys - num_queries + first + ROWS // GROUP)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        exists = keys < num_keys
        slot = tl.load(slots + key_start + keys, mask=exists, other=0).to(tl.int64)
        key_at = key + slot[None, :] * key_stride + key_head * key_head_stride + dims[:, None]
        k = tl.load(key_at, mask=exists[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(q, k) * scale
        scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        value_at = value + slot[:, None] * value_stride + key_head * value_head_stride + dims[None, :]
        v = tl.load(value_at, mask=exists[:, None] & inside[None, :], other=0.0)
        weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None])
        peak = higher
    out_at = out + (query_start + token).to(tl.int64)[:, None] * out_stride + head[:, None] * out_head_stride + dims[None, :]
    tl.store(out_at, (weighted / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None] & inside[None, :])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    slots: Tensor,
    *,
    longest: int,
    scale: float,
    out: Tensor,
) -> None:
    """Compute causal attention of the last tokens of S sequences, whose keys and values lie in arbitrary slots of a pool of size P.

    Query head h reads key head h * Hkv // H.

    Args:
        query: [T, H, D] in half precision; last axis contiguous, as for `key`, `value` and `out`.
        key: [P, Hkv, D]
        value: [P, Hkv, D]
        query_starts: [S + 1] start of each sequence's queries, which are its last tokens.
        key_starts: [S + 1] start of each sequence's keys in `slots`.
        slots: [K] position in the pool of each key, in the order of its sequence.
        longest: largest number of queries of a sequence.
        scale: factor of the scores, usually D ** -0.5.
        out: [T, H, D], written.
    """
    group, size = query.size(1) // key.size(1), query.size(2)
    _attention_kernel[(triton.cdiv(longest, ROWS // group), key.size(1), len(query_starts) - 1)](
        query, key, value, out, query_starts, key_starts, slots, scale * 1.4426950408889634,  # log2(e), for exp2
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2],
        GROUP=group, SIZE=size, WIDTH=triton.next_power_of_2(size), ROWS=ROWS, KEYS=KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _log_sum_exp_kernel(logits, out, num_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    highest = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    for start in range(0, num_columns, COLUMNS):
        inside = start + columns < num_columns
        highest = tl.maximum(highest, tl.load(logits + row * num_columns + start + columns, mask=inside, other=float("-inf")))
    peak = tl.max(highest)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, num_columns, COLUMNS):
        inside = start + columns < num_columns
        total += tl.exp(tl.load(logits + row * num_columns + start + columns, mask=inside, other=float("-inf")) - peak)
    tl.store(out + row, peak + tl.log(tl.sum(total)))


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return the logsumexp [N] of the rows of [N, V] float32."""
    logits = logits.contiguous()
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _log_sum_exp_kernel[(len(logits),)](logits, out, logits.size(1), COLUMNS=LOGITS, num_warps=8)
    return out


@triton.jit
def _rotate_kernel(
    x, out, positions, cosines, sines, x_stride, x_head_stride, angle_stride, num_heads,
    HALF: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside = dims < HALF
    low_at = x + token * x_stride + head * x_head_stride + dims
    low = tl.load(low_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(low_at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle_at = tl.load(positions + token).to(tl.int64) * angle_stride + dims
    dtype = out.dtype.element_ty
    cos = tl.load(cosines + angle_at, mask=inside, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(sines + angle_at, mask=inside, other=0.0).to(dtype).to(tl.float32)
    if BACKWARD:
        sin = -sin
    new_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    new_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    out_at = out + (token * num_heads + head) * 2 * HALF + dims
    tl.store(out_at, new_low.to(dtype), mask=inside)
    tl.store(out_at + HALF, new_high.to(dtype), mask=inside)


def rotate(x: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor, *, backward: bool = False) -> Tensor:
    """Apply rotary embeddings with transformers' rounding: cosines, sines and both products are rounded to x's dtype before the sum.

    Args:
        x: [T, H, D] in half precision, the last axis contiguous.
        positions: [T] rows of `cosines` and `sines`.
        cosines: [P, at least D / 2]; the first D / 2 columns are read.
        sines: like `cosines`, with the same strides.
        backward: rotate by the negative angles, for gradients.

    Returns:
        [T, H, D]
    """
    num_heads, half = x.size(1), x.size(2) // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _rotate_kernel[(len(x), num_heads)](
            x, out, positions, cosines, sines, x.stride(0), x.stride(1), cosines.stride(0), num_heads,
            HALF=half, WIDTH=triton.next_power_of_2(half), BACKWARD=backward, num_warps=1, **ROUND_EACH,
        )  # fmt: skip
    return out


@triton.jit
def _swiglu_kernel(gate, up, out, gate_stride, up_stride, num_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + columns, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate, up, grad, grad_gate, grad_up, num_columns, COLUMNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * num_columns + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS) < num_columns
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    tl.store(grad_gate + at, (d * u * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (d * g * sigmoid).to(grad_up.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, rounded once; [N, K], last axes contiguous."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if len(gate):
        grid = (len(gate), triton.cdiv(gate.size(1), SWIGLU_COLUMNS))
        _swiglu_kernel[grid](gate, up, out, gate.stride(0), up.stride(0), gate.size(1), COLUMNS=SWIGLU_COLUMNS, num_warps=4)
    return out


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; all [N, K], contiguous."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    if len(gate):
        grid = (len(gate), triton.cdiv(gate.size(1), SWIGLU_COLUMNS))
        _swiglu_backward_kernel[grid](gate, up, grad, of_gate, of_up, gate.size(1), COLUMNS=SWIGLU_COLUMNS, num_warps=4)
    return of_gate, of_up
