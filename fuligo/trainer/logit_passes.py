"""Passes over the logits of a chunk of tokens: sums of their rows, and their gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowSums(NamedTuple):
    """Sums over the rows of [n, V] logits l; each [n]."""

    peak: Tensor
    """max l"""
    total: Tensor
    """sum of exp(l - peak)"""
    weighted: Tensor
    """sum of exp(l - peak) (l - peak)"""

    def seen_from(self, peak: Tensor) -> tuple[Tensor, Tensor]:
        """Rescale `total` and `weighted` to a peak at least as high: with s = own - other, e^s total and e^s (weighted + s total)."""
        shift = self.peak - peak
        scale = shift.exp()
        return scale * self.total, scale * (self.weighted + shift * self.total)


def row_sums(logits: Tensor) -> RowSums:
    """Return the sums of [n, V] float32, V at least 1."""
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
    """Return [n, V] the gradient of the logits, rounded to `dtype` once.

    With p = softmax: d logprob / d logit_v = [v = target] - p_v, d entropy / d logit_v = -p_v (log p_v + entropy). V may be a part of
    the vocabulary.

    Args:
        logits: [n, V] float32
        targets: [n]; those outside these columns are another rank's.
        log_total: [n] log of the sum of exp(logit) over the whole vocabulary.
        entropy: [n] nats
        grad_logprobs: [n]
        grad_entropy: [n]
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
    """Return the gradient without the term `grad_logprobs` that each target's own logit gets in addition."""
    log_softmax = logits - log_total[:, None]
    slope = torch.zeros_like(log_total)[:, None] if grad_logprobs is None else -grad_logprobs[:, None]
    if grad_entropy is None:
        return log_softmax.exp_().mul_(slope).to(dtype)
    slope = slope - (log_softmax + entropy[:, None]) * grad_entropy[:, None]
    return log_softmax.exp_().mul_(slope).to(dtype)


def _compiled_on_gpu(pass_: Callable[..., Any], logits: Tensor) -> Callable[..., Any]:
    """Return a pass, compiled on GPUs, where moving the logits to and from memory takes the time."""
    return _compiled(pass_) if logits.is_cuda else pass_


@functools.cache
def _compiled(pass_: Callable[..., Any]) -> Callable[..., Any]:
    # Here and not at the top of the module, because torch.compile imports the compiler, which takes longer than a rank's own modules.
    return torch.compile(pass_, dynamic=True)  # the last chunk of a batch is shorter than the others: one kernel serves all lengths
