"""Log-probabilities and entropies from logits: parts shared by the output layers of all backends."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fuligo.models.cpu_products import product


class TokenLogprobs(NamedTuple):
    """Float32 log-probabilities and entropies of softmax(logits / temperature) over the full vocabulary."""

    logprobs: Tensor
    """[N] log-probabilities of the target tokens."""
    entropy: Tensor
    """[N] entropies in nats."""


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Split `num_tokens` tokens into consecutive slices of at most `chunk_tokens`."""
    return (slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens))


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return [n, V] float32 logits, divided by the temperature. In half precision, rounding would dominate policy ratios.

    Args:
        hidden: [n, E] hidden states.
        weight: [V, E] weight of the output layer.
        bias: [V] bias of the output layer; None if it has none.
        temperature: divisor of the logits.
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = product(hidden.float(), weight.float())
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits /= temperature
    return logits


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left @ right in float32, whatever the precision of the factors."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += product(right.float().t(), left.float()).t()  # oneDNN copies the first factor, which must not be the large one


def rowwise_dot(left: Tensor, right: Tensor) -> Tensor:
    """Return [n] dot products of the rows of two [n, V] tensors, without a third tensor of that size."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]
