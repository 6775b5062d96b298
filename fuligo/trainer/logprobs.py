"""Log-probability and entropy from logits: the part that all backends' output layers share."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Float32, of the distribution softmax(logits / temperature) over the full vocabulary."""

    logprobs: Tensor
    """[N] of the target tokens"""
    entropy: Tensor
    """[N] nats"""


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Split tokens into slices of at most `chunk_tokens`."""
    return (slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens))


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return [n, V] float32 logits. They are never rounded to half precision, which would drown ratios of policies in noise.

    Args:
        hidden: [n, E]
        weight: [V, E]
        bias: [V]
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits /= temperature
    return logits


def grad_of_logits(log_softmax: Tensor, entropy: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """Return [n, V] the gradient of the logits, without the term `grad_logprobs` that each target's own logit gets in addition.

    With p = softmax: d logprob / d logit_v = [v = target] - p_v, d entropy / d logit_v = -p_v (log p_v + entropy). V may be a part of
    the vocabulary.
    """
    probs = log_softmax.exp()
    if grad_entropy is None:
        return probs.zero_() if grad_logprobs is None else probs.mul_(-grad_logprobs[:, None])
    slope = (log_softmax + entropy[:, None]).mul_(-grad_entropy[:, None])
    if grad_logprobs is not None:
        slope -= grad_logprobs[:, None]
    return probs.mul_(slope)


def rowwise_dot(left: Tensor, right: Tensor) -> Tensor:
    """Return [n] dot products of the rows of two [n, V], without a third tensor of that size."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]
