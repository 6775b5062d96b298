"""Matrix products, attention, norms and softmax whose result for a row depends only on that row, to the last bit.

Ordinary kernels choose block sizes and summation order by the shapes of a call, so a token's log-probability depends on how many others are
computed with it, and engine and trainer differ by rounding. On a GPU, `models.invariant_kernels` sums in a fixed order; its inputs are in
half precision.

On a CPU sums are exact instead, and an exact sum has one value in any order. The terms are rounded first, to multiples of a common unit so
coarse that float64 holds every partial sum without rounding (fixed-point pre-rounding: Rump, Ogita & Oishi, "Accurate floating-point
summation", 2008; for matrix products Ozaki et al. 2012). A library may then split, reorder and fuse the sum in any way, with any number of
threads. A row's unit depends only on that row.

All else is element by element: additions, products, divisions and square roots, which IEEE 754 defines to the bit, and torch's `exp` and
`log`, which use one vector function for all elements. (On a CPU its `silu` and `sigmoid` use another for the last elements of a tensor.)

Gradients come from ordinary kernels; only forward values are batch-invariant.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuligo.models.attention import equal_length_runs, packed_attention, varlen_row
from fuligo.models.cpu_products import product
from fuligo.models.gpu_invariant import kernels, paged_attention

MANTISSA_BITS = 53
"""Number of mantissa bits of a float64, with the implicit one: integers up to 2 ** 53 are exact."""
INPUT_BLOCK = 512
"""Number of inputs of a matrix product that are summed exactly; longer rows add the sums of their blocks one after another."""
KEY_BLOCK = 512
"""Number of keys whose values are summed exactly, in blocks counted from the start of the sequence."""
MAX_KEYS_LOG2 = 20
"""log2 of the largest number of keys whose weights are summed exactly."""
MAX_ELEMENTS = 1 << 20
"""Largest number of elements of a float64 intermediate (8 MiB); larger ones are computed in parts."""


def round_rows(x: Tensor, bits: int) -> Tensor:
    """Round each row of [..., K] to multiples of a unit such that its largest element is at most 2 ** bits units; float64.

    Adding and subtracting c = 2 ** (53 - bits) times the largest element cuts off the bits below the unit.
    """
    cut = _largest(x).double().mul_(2.0 ** (MANTISSA_BITS - bits))
    return (x + cut).sub_(cut)


def _largest(x: Tensor) -> Tensor:
    """Return [..., 1] the largest magnitude of each row of [..., K]."""
    return x.abs().amax(-1, keepdim=True)  # for short rows ten times as fast as the norm


def exact_row_sums(x: Tensor, largest: Tensor | float, num_terms_log2: int) -> Tensor:
    """Return [..., 1] sums of the rows of [..., K] float64, each term rounded to MANTISSA_BITS - `num_terms_log2` bits.

    Args:
        x: not negative; overwritten.
        largest: [..., 1] largest term of each row, or a bound for all.
        num_terms_log2: log2 of an upper bound of K. Rows may be padded with zeros.
    """
    cut = largest * 2.0**num_terms_log2
    return x.add_(cut).sub_(cut).sum(-1, keepdim=True)


def _log2_above(number: int) -> int:
    return (number - 1).bit_length()


def _bits(num_inputs: int) -> tuple[int, int]:
    """Return the number of bits to which inputs and weights are rounded for an exact product over `num_inputs` inputs."""
    free = MANTISSA_BITS - _log2_above(min(num_inputs, INPUT_BLOCK))
    return free // 2, free - free // 2


def round_weight(weight: Tensor) -> list[Tensor]:
    """Return a weight [N, K] rounded for `linear`, as blocks of inputs: each [N, at most INPUT_BLOCK] float64."""
    _, bits = _bits(weight.size(1))
    return [round_rows(block, bits) for block in weight.detach().split(INPUT_BLOCK, 1)]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rounded: Sequence[Tensor] | None = None,
    dtype: torch.dtype,
    ranks: int = 1,
) -> Tensor:
    """Return x @ weight.T + bias, [..., N], in `dtype`.

    On a CPU, each row is rounded in blocks of `INPUT_BLOCK` inputs, to 22 bits below the block's largest element (more if K < 512).

    Args:
        x: [..., K]
        weight: [N, K]
        bias: [N]
        rounded: `round_weight(weight)`, used on a CPU; None: computed here.
        ranks: tensor-parallel GPUs of the engine whose rounding is reproduced (`invariant_kernels.linear`); ignored on a CPU.
    """
    result: Tensor = _Linear.apply(x, weight, bias, rounded, dtype, ranks)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounded: Sequence[Tensor] | None, dtype: torch.dtype, ranks: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            return kernels().linear(x, weight, bias, dtype, ranks)
        rows, (num_outputs, num_inputs) = x.reshape(-1, x.size(-1)), weight.shape
        bits, _ = _bits(num_inputs)
        blocks = round_weight(weight) if rounded is None else rounded
        out = x.new_empty(len(rows), num_outputs, dtype=dtype)
        for part in _parts(len(rows), max(num_inputs, num_outputs)):
            inputs = rows[part].split(INPUT_BLOCK, 1)
            total = round_rows(inputs[0], bits) @ blocks[0].t()
            for more, block in zip(inputs[1:], blocks[1:], strict=True):
                total += round_rows(more, bits) @ block.t()
            out[part] = total if bias is None else total.add_(bias)
        return out.view(*x.shape[:-1], num_outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows = grad.flatten(0, -2).to(weight.dtype)
        return (
            product(rows, weight.t()).view_as(x) if of_x else None,
            product(rows.t(), x.reshape(-1, x.size(-1)).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
            None,
            None,
        )


def _parts(num_rows: int, width: int) -> Iterator[slice]:
    """Split rows into slices of at most `MAX_ELEMENTS` elements."""
    size = max(1, MAX_ELEMENTS // width)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x) over the last axis, [..., K]; as in transformers, x / rms(x) is first rounded to x's dtype."""
    result: Tensor = _RmsNorm.apply(x, weight, eps)
    return result


class _RmsNorm(torch.autograd.Function):
    """RMSNorm: y = w * n with n = x / rms(x); dx = (w * dy - n * mean(w * dy * n)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.is_cuda:
            out, inverse_rms = kernels().rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, inverse_rms)
            return out
        squares = x.double().square_()
        total = exact_row_sums(squares, squares.amax(-1, keepdim=True), _log2_above(x.size(-1)))
        rms = total.div_(x.size(-1)).add_(eps).sqrt_().float()
        normed = (x / rms).to(x.dtype)
        ctx.save_for_backward(normed, weight, rms)
        return weight * normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyrefly: ignore[bad-override]
        if grad.is_cuda:
            x, weight, inverse_rms = ctx.saved_tensors
            wanted = list(ctx.needs_input_grad[:2])
            gradients = torch.ops.aten._fused_rms_norm_backward(
                grad.contiguous(), x.contiguous(), [x.size(-1)], inverse_rms, weight, wanted
            )
            return *gradients, None
        normed, weight, rms = ctx.saved_tensors
        product = grad.float() * normed
        of_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = (product @ weight.float())[..., None] / weight.size(0)
        of_x = (grad.float() * weight).sub_(normed * mean).div_(rms)
        return of_x.to(normed.dtype), of_weight, None


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), rounded once to x's dtype; for CPUs."""
    result: Tensor = _Silu.apply(x)
    return result


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x / x.float().neg().exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax of [N, K] over the last axis, float32."""
    result: Tensor = _Softmax.apply(logits.float())
    return result


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        powers = (logits - logits.amax(-1, keepdim=True)).exp_()
        shares = powers.div_(exact_row_sums(powers.double(), 1.0, _log2_above(logits.size(-1))).float())
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        (shares,) = ctx.saved_tensors
        weighted = grad * shares
        return weighted - shares * weighted.sum(-1, keepdim=True)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-softmax of [N, V] float32 over the last axis, without gradient; for CPUs."""
    below = logits - logits.amax(-1, keepdim=True)
    num_terms_log2 = _log2_above(logits.size(-1))
    for part in _parts(*below.shape):
        total = exact_row_sums(below[part].exp().double(), 1.0, num_terms_log2)
        below[part] -= total.log_().float()
    return below


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, hidden: Tensor | None, scale: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute softmax attention with grouped query heads (query head h reads key head h * Hkv // H), without gradient.

    Hidden keys at the end do not change the result, so a query may be computed with any number of later keys.

    Args:
        query: [B, L, H, D]
        key: [B, K, Hkv, D] of tokens 0 to K - 1 of their sequences.
        value: [B, K, Hkv, Dv]
        hidden: [B or 1, L, K] True where the query does not attend to the key; None: nowhere.
        scale: factor of the scores, usually D ** -0.5.
        dtype: dtype of the result; None: that of the query.

    Returns:
        [B, L, H, Dv]
    """
    out = query.new_empty(*query.shape[:3], value.size(3), dtype=dtype or query.dtype)
    for part in _parts(len(key), key[0].numel()):
        of_part = hidden if hidden is None or len(hidden) == 1 else hidden[part]
        out[part] = _attend(query[part], key[part], value[part], of_part, scale)
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Return the float64 output of `attention`."""
    num_sequences, length, _, _ = query.shape
    num_key_heads = key.size(2)
    group = query.size(2) // num_key_heads
    query_bits, key_bits = _bits(query.size(-1))
    # [B, Hkv, L * group, D]: query heads that share a key head are rows of one product
    q = query.unflatten(2, (num_key_heads, group)).transpose(1, 2).reshape(num_sequences, num_key_heads, length * group, -1)
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    scores = (round_rows(q, query_bits) @ round_rows(k, key_bits).transpose(2, 3)).float().mul_(scale)
    if hidden is not None:
        scores.unflatten(2, (length, group)).masked_fill_(hidden[:, None, :, None], float("-inf"))
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    total = exact_row_sums(weights.double(), 1.0, MAX_KEYS_LOG2)
    out = _weighted_sums(weights, v).div_(total)
    return out.unflatten(2, (length, group)).transpose(1, 2).flatten(2, 3)


def _weighted_sums(weights: Tensor, value: Tensor) -> Tensor:
    """Return weights [B, Hkv, R, K] @ value [B, Hkv, K, Dv] in float64, exact within blocks of keys.

    Each token's values are divided by a power of two, and its weights are multiplied by it, so that the values of all tokens have the same
    unit.
    """
    value_bits = (MANTISSA_BITS - _log2_above(KEY_BLOCK)) // 2
    weight_bits = MANTISSA_BITS - _log2_above(KEY_BLOCK) - value_bits
    # Each token's largest value is below 2 * power.
    power = _largest(value).float().view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).clamp_(min=2.0**-126).double()
    cut = 2.0 ** (MANTISSA_BITS + 1 - value_bits)  # at most 2 ** value_bits units make up 2.0
    normed = (value / power).add_(cut).sub_(cut)
    out: Tensor | None = None
    for w, v, p in zip(weights.split(KEY_BLOCK, 3), normed.split(KEY_BLOCK, 2), power.split(KEY_BLOCK, 2)):
        block = round_rows(w * p.transpose(2, 3), weight_bits) @ v
        out = block if out is None else out.add_(block)
    assert out is not None, "attention without keys"
    return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Sequence[int], *, scale: float) -> Tensor:
    """Return causal attention [T, H, Dv] within packed sequences; on a GPU, Dv must equal D.

    `query` is [T, H, D], `key` [T, Hkv, D], `value` [T, Hkv, Dv]; `cu_seqlens` [S + 1] are the sequences' starts, from 0 to T.
    """
    result: Tensor = _CausalAttention.apply(query, key, value, tuple(cu_seqlens), scale)
    return result


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: tuple[int, ...], scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.cu_seqlens, ctx.scale = cu_seqlens, scale
        if query.is_cuda:
            starts, longest = varlen_row(cu_seqlens, query.device)
            slots = torch.arange(len(key), device=query.device)
            return paged_attention(query, key, value, starts, starts, slots, longest=len(longest), scale=scale)
        out = query.new_empty(*query.shape[:2], value.size(2))
        start = 0
        for count, length in equal_length_runs(cu_seqlens):
            end = start + count * length
            q, k, v, o = (x[start:end].unflatten(0, (count, length)) for x in (query, key, value, out))
            _attend_causally(q, k, v, o, scale)
            start = end
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            ordinary = packed_attention(query, key, value, ctx.cu_seqlens, scale=ctx.scale)
            return (*torch.autograd.grad(ordinary, (query, key, value), grad), None, None)


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, out: Tensor, scale: float) -> None:
    """Fill `out` [S, L, H, Dv] for sequences of equal length, in slices of sequences and queries that bound the memory."""
    num_sequences, length, num_heads, _ = query.shape
    rows = max(1, MAX_ELEMENTS // (num_heads * length))
    batch, block = max(1, rows // length), min(length, rows)
    positions = torch.arange(length, device=query.device)
    for first in range(0, num_sequences, batch):
        some = slice(first, first + batch)
        for start, end in pairwise([*range(0, length, block), length]):
            hidden = (positions[None, :end] > positions[start:end, None])[None]
            out[some, start:end] = attention(query[some, start:end], key[some, :end], value[some, :end], hidden=hidden, scale=scale)
