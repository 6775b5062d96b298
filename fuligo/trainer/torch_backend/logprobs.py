"""Log-probabilities and entropies of response tokens from hidden states, with the logits of only one chunk of tokens in memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuligo.models.batch_invariant import linear, log_softmax
from fuligo.models.cpu_products import product
from fuligo.models.gpu_invariant import kernels
from fuligo.trainer.logprobs import TokenLogprobs, add_product, chunks, grad_of_logits, row_sums, rowwise_dot, scaled_logits


class OutputHead(NamedTuple):
    """Output layer that maps hidden states to logits."""

    weight: Tensor
    """[V, E] weight."""
    bias: Tensor | None
    """[V] bias; None if the layer has none."""
    cap: float | None = None
    """Bound c of soft-capped logits, c tanh(logit / c); None: no soft-capping."""

    def detached(self) -> "OutputHead":
        return OutputHead(self.weight.detach(), None if self.bias is None else self.bias.detach(), self.cap)


def token_logprobs(
    hidden: Tensor, head: OutputHead, targets: Tensor, *, temperature: float, chunk_tokens: int, is_batch_invariant: bool = False
) -> TokenLogprobs:
    """Compute the log-probabilities of `targets` and the entropies of their distributions; both are differentiable.

    Peak memory beyond inputs and gradients is a few [chunk_tokens, V] float32 tensors in either pass. The backward pass recomputes the
    logits of each chunk, except if a single chunk holds all tokens and logits are not soft-capped: they are then kept from the forward
    pass.

    Args:
        hidden: [N, E] hidden state *before* each target: position t - 1 predicts token t.
        targets: [N] int64 target tokens.
        chunk_tokens: number of tokens whose logits are in memory at a time.
        is_batch_invariant: compute log-probabilities with `models.batch_invariant`, as batch-invariant engines do.
    """
    return TokenLogprobs(*_TokenLogprobs.apply(hidden, *head, targets, temperature, chunk_tokens, is_batch_invariant))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # autograd passes positional arguments only
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cap: float | None,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        is_batch_invariant: bool,
    ) -> tuple[Tensor, Tensor]:
        # Separate tensors, because FSDP warns about outputs that are views.
        logprobs, entropy, log_total = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        logits = None
        assert cap is None or not is_batch_invariant, "batch-invariant models have no soft-capping"
        for chunk in chunks(len(targets), chunk_tokens):
            if is_batch_invariant:
                logits = _invariant_logits(hidden[chunk], weight, bias, temperature)
            else:
                logits = _logits(_capped(scaled_logits(hidden[chunk], weight, bias, temperature), cap, temperature))
            logprobs[chunk], entropy[chunk], log_total[chunk] = _logprobs(logits, targets[chunk], is_batch_invariant)
        whole = logits if len(targets) <= chunk_tokens and cap is None else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, log_total, whole)
        ctx.cap, ctx.temperature, ctx.chunk_tokens = cap, temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  # two outputs, two gradients
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, log_total, whole = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        for chunk in chunks(len(targets), ctx.chunk_tokens):
            slope = None
            if whole is not None:
                logits = whole
            else:
                logits = _capped(scaled_logits(hidden[chunk], weight, bias, ctx.temperature), ctx.cap, ctx.temperature)
                if ctx.cap is not None:
                    slope = 1 - (logits * (ctx.temperature / ctx.cap)).square()
                logits = _logits(logits)
            of_logprobs = None if grad_logprobs is None else grad_logprobs[chunk] / ctx.temperature
            of_entropy = None if grad_entropy is None else grad_entropy[chunk] / ctx.temperature
            dtype = hidden.dtype if grad_bias is None else torch.float32
            grad_logits = grad_of_logits(logits, targets[chunk], log_total[chunk], entropy[chunk], of_logprobs, of_entropy, dtype)
            del logits
            if slope is not None:
                grad_logits = (grad_logits * slope).to(dtype)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = product(grad_logits, weight.to(hidden.dtype).t())
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[chunk])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _capped(logits: Tensor, cap: float | None, temperature: float) -> Tensor:
    """Soft-cap logits that are already divided by the temperature."""
    return logits if cap is None else torch.tanh(logits * (temperature / cap)) * (cap / temperature)


def _logits(logits: Tensor) -> Tensor:
    """Return the [n, V] logits on a GPU, their log-softmax on a CPU, where torch's kernel needs the fewest passes over memory."""
    return logits if logits.is_cuda else logits.log_softmax(-1)


def _invariant_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the [n, V] batch-invariant logits on a GPU, their log-softmax on a CPU."""
    logits = linear(hidden, weight, bias, dtype=torch.float32)
    logits = logits if temperature == 1.0 else logits / temperature
    return logits if logits.is_cuda else log_softmax(logits)


def _logprobs(logits: Tensor, targets: Tensor, is_batch_invariant: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the [n] log-probabilities, entropies and logs of the sum of exp(logit); `logits` are the log-softmax on a CPU."""
    at_target = logits.gather(1, targets[:, None]).squeeze(1)
    if not logits.is_cuda:
        return at_target, -rowwise_dot(logits.exp(), logits), torch.zeros_like(at_target)
    sums = row_sums(logits)
    log_sum = sums.total.log()
    if is_batch_invariant:
        return at_target - kernels().log_sum_exp(logits), log_sum - sums.weighted / sums.total, sums.peak + log_sum
    return at_target - sums.peak - log_sum, log_sum - sums.weighted / sums.total, sums.peak + log_sum
