"""Log-probabilities and entropies from logits: passes over chunks of tokens that the output layers of all backends share."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class RowSums(NamedTuple):
    """Row-wise sums of [n, V] logits l, each [n]."""

    peak: Tensor
    """Maximum of l."""
    total: Tensor
    """Sum of exp(l - peak)."""
    weighted: Tensor
    """Sum of exp(l - peak) * (l - peak)."""

    def seen_from(self, peak: Tensor) -> tuple[Tensor, Tensor]:
        """Return `total` and `weighted` relative to a `peak` that is at least `self.peak`.

        With s = self.peak - peak, these are e^s total and e^s (weighted + s total).
        """
        shift = self.peak - peak
        scale = shift.exp()
        return scale * self.total, scale * (self.weighted + shift * self.total)


def row_sums(logits: Tensor) -> RowSums:
    """Return the row-wise sums of [n, V] float32 logits, V at least 1."""
    return RowSums(*_compiled_on_gpu(_row_sums, logits)(logits))


def grad_of_logits(
    logits: Tensor,
    targets: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the [n, V] gradient with respect to the logits, rounded to `dtype` once.

    With p = softmax: d logprob / d logit_v = [v = target] - p_v, d entropy / d logit_v = -p_v (log p_v + entropy). V may be one rank's
    part of the vocabulary.

    Args:
        logits: [n, V] float32.
        targets: [n] column of each target; outside 0 to V - 1 if another rank has it.
        log_total: [n] log of the sum of exp(logit) over the whole vocabulary.
        entropy: [n] nats.
        grad_logprobs: [n] gradient with respect to the log-probabilities; None: 0.
        grad_entropy: [n] gradient with respect to the entropies; None: 0.
    """
    gradients = log_total, entropy, grad_logprobs, grad_entropy
    grad = _compiled_on_gpu(_grad_without_targets, logits)(logits, *gradients, dtype)
    if grad_logprobs is not None and logits.size(1):
        own = ((targets >= 0) & (targets < logits.size(1)))[:, None]
        column = targets[:, None].where(own, 0)
        at_target = _grad_without_targets(logits.gather(1, column), *gradients, torch.float32) + grad_logprobs[:, None]
        grad.scatter_(1, column, at_target.to(dtype).where(own, grad.gather(1, column)))
    return grad


def _row_sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    peak = logits.amax(-1)
    below = logits - peak[:, None]
    exp = below.exp()
    return peak, exp.sum(-1), below.mul_(exp).sum(-1)


def _grad_without_targets(
    logits: Tensor, log_total: Tensor, entropy: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the gradient without the additional term `grad_logprobs` of each target's logit."""
    log_softmax = logits - log_total[:, None]
    slope = torch.zeros_like(log_total)[:, None] if grad_logprobs is None else -grad_logprobs[:, None]
    if grad_entropy is None:
        return log_softmax.exp_().mul_(slope).to(dtype)
    slope = slope - (log_softmax + entropy[:, None]) * grad_entropy[:, None]
    return log_softmax.exp_().mul_(slope).to(dtype)


def _compiled_on_gpu(pass_: Callable[..., Any], logits: Tensor) -> Callable[..., Any]:
    """Return `pass_`, compiled if the logits are on a GPU, where memory traffic of the logits dominates its time.

    It is not compiled for a single row, which the last chunk of a batch may have: the compiler would take the 1 for a constant and
    compile again.
    """
    return _compiled(pass_) if logits.is_cuda and logits.size(0) > 1 else pass_


@functools.cache
def _compiled(pass_: Callable[..., Any]) -> Callable[..., Any]:
    # Not at import time, because torch.compile imports the compiler, which takes longer to import than a rank's other modules.
    return torch.compile(pass_, dynamic=True)  # the last chunk of a batch is shorter than the others: one kernel serves all lengths
