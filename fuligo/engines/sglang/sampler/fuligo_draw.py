"""Tokens drawn from logits in one pass, with the Gumbel trick: the largest of logit + Gumbel noise is a draw from the softmax.

Each program reads `LOGITS` logits of a row. It returns their softmax's denominator, and the token with the largest noisy logit; a second
kernel combines these parts of a row. The noise comes from Philox, whose key is a number that torch's generator draws, plus the row. As with
`torch.multinomial`, ranks with the same seed draw the same tokens, as tensor parallelism needs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOGITS = 2048
"""Number of logits per program."""
SMALLEST = tl.constexpr(2.0**-32)
"""Replaces a random number of 0, whose Gumbel noise would be infinite; the next larger one is 2^-31."""


def draw(logits: Tensor, temperatures: Tensor, replica: int = 0) -> tuple[Tensor, Tensor]:
    """Draw a token per row from softmax(logits / temperature), and return it with its log-probability.

    A row that has NaN, or no finite logit, ends the process on a GPU, as in `torch.multinomial`.

    Args:
        logits: float32 [R, V]; a row is contiguous, and may be part of a longer one (a padded vocabulary)
        temperatures: float32 [R, 1], positive
        replica: index among replicas that have the same seed and draw for different requests

    Returns:
        int32 [R] and float32 [R].
    """
    num_rows, num_logits = logits.shape
    num_parts, stride = triton.cdiv(num_logits, LOGITS), logits.stride(0)
    seed = torch.empty(replica + 1, dtype=torch.int64, device=logits.device).random_()[replica:]
    sums = torch.empty(num_rows, num_parts, 3, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    _draw_parts[(num_rows, num_parts)](logits, temperatures, seed, sums, chosen, stride, num_logits, num_parts, LOGITS, num_warps=8)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _combine[(num_rows,)](logits, temperatures, sums, chosen, tokens, logprobs, stride, num_parts, triton.next_power_of_2(num_parts))
    torch._assert_async(logprobs.isfinite().all(), "cannot sample: logits are NaN or infinite")
    return tokens, logprobs


@triton.jit
def _draw_parts(logits, temperatures, seed, sums, chosen, stride, num_logits, num_parts, LOGITS: tl.constexpr):
    """Write a part's largest logit, denominator and largest noisy logit to `sums` [R, P, 3], and the latter's token to `chosen`.

    Denominator and noisy logit are relative to the largest logit: divided by a small temperature, a logit may be so large that adding noise
    would not change it.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * LOGITS + tl.arange(0, LOGITS)
    values = tl.load(logits + row * stride + columns, columns < num_logits, other=float("-inf"))
    peak = tl.max(values, 0)
    above = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf would be NaN
    scaled = (values - above) / tl.load(temperatures + row)
    # Gumbel noise is -log(-log(1 - u)). With v = 1 - u, rounded, u / (1 - v) * log(v) equals log(1 - u) to the last bits, also for a small
    # u, to which the largest noise belongs.
    uniform = tl.maximum(tl.rand(tl.load(seed) + row, columns), SMALLEST)
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, uniform / (1.0 - rest) * -tl.log(rest))
    noisy = scaled - tl.log(exponential)
    at = row * num_parts + part
    tl.store(sums + 3 * at, peak)
    tl.store(sums + 3 * at + 1, tl.sum(tl.exp(scaled), 0))
    tl.store(sums + 3 * at + 2, tl.max(noisy, 0))
    # If there is NaN, the position of the largest may be any, but the token must be in the row for `_combine` to read its logit.
    tl.store(chosen + at, tl.minimum(part * LOGITS + tl.argmax(noisy, 0), num_logits - 1))


@triton.jit
def _combine(logits, temperatures, sums, chosen, tokens, logprobs, stride, num_parts, PARTS: tl.constexpr):
    """Write the token of a row and its log-probability."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    at, is_part = row * num_parts + parts, parts < num_parts
    temperature = tl.load(temperatures + row)
    peaks = tl.load(sums + 3 * at, is_part, other=float("-inf"))
    peak = tl.max(peaks, 0)
    scaled = (peaks - peak) / temperature
    total = tl.sum(tl.load(sums + 3 * at + 1, is_part, other=0.0) * tl.exp(scaled), 0)
    best = tl.argmax(tl.load(sums + 3 * at + 2, is_part, other=float("-inf")) + scaled, 0)
    token = tl.load(chosen + row * num_parts + tl.minimum(best, num_parts - 1))
    tl.store(tokens + row, token)
    tl.store(logprobs + row, (tl.load(logits + row * stride + token) - peak) / temperature - tl.log(total))
