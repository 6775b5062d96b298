"""Log-probability and entropy of response tokens with a vocabulary split over the TP ranks. Logits never leave their rank."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuligo.trainer.logprobs import TokenLogprobs, chunks, scaled_logits


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    num_vocab: int,
    tp_group: dist.ProcessGroup,
) -> TokenLogprobs:
    """Compute the log-probabilities of `targets` and the entropies of their distributions; both are differentiable.

    Every rank of `tp_group` calls it with the same tokens and gets the same values. The gradient of `hidden` is this rank's part of a
    sum over the ranks, which the region that `hidden` comes from adds up (`copy_to_tensor_model_parallel_region`). The gradient of
    `weight` goes, in float32, straight to its `main_grad` if Megatron's data parallelism has given it one.

    Peak memory beyond inputs and gradients is a few [chunk_tokens, V / tp] float32 tensors in either pass: the backward pass computes
    the logits of a chunk again.

    Args:
        hidden: [N, E] the hidden state *before* each target: position t - 1 predicts token t.
        weight: [V' / tp, E] this rank's rows of the output layer, whose V' tokens are the vocabulary and padding behind it.
        targets: [N]
        chunk_tokens: tokens whose logits exist at a time.
        num_vocab: V; the padding behind has no probability and no gradient.
    """
    first = dist.get_rank(tp_group) * weight.size(0)
    num_own = max(0, min(weight.size(0), num_vocab - first))
    return TokenLogprobs(*_VocabParallelLogprobs.apply(hidden, weight, targets - first, temperature, chunk_tokens, num_own, tp_group))


def gather_predictions(local: TokenLogprobs, local_ids: Tensor, num_total: int, cp_group: dist.ProcessGroup) -> TokenLogprobs:
    """Call `gather_tokens` for both tensors."""
    if cp_group.size() == 1:
        return local
    return TokenLogprobs(*_GatherTokens.apply(torch.stack(local), local_ids, num_total, cp_group).unbind())


def gather_tokens(local: Tensor, local_ids: Tensor, num_total: int, cp_group: dist.ProcessGroup) -> Tensor:
    """Gather all [..., N] values of a micro-batch on every context-parallel rank, each of which has computed some.

    Every rank then has the same whole loss; the gradient that a rank gets back is that of its own values.

    Args:
        local: [..., n] this rank's values.
        local_ids: [n] their numbers among the N; each is on exactly one rank.
    """
    return local if cp_group.size() == 1 else _GatherTokens.apply(local, local_ids, num_total, cp_group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, local_ids: Tensor, num_total: int, group: dist.ProcessGroup) -> Tensor:
        whole = local.new_zeros(*local.shape[:-1], num_total)
        whole[..., local_ids] = local
        dist.all_reduce(whole, group=group)
        ctx.save_for_backward(local_ids)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (local_ids,) = ctx.saved_tensors
        return grad[..., local_ids], None, None, None


class _VocabParallelLogprobs(torch.autograd.Function):
    """Autograd function. `targets` count from this rank's first token; `num_own` of its rows are not padding."""

    @staticmethod
    def forward(  # autograd passes positional arguments only
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        num_own: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        peak, log_sum, logprobs, entropy = hidden.new_empty(4, len(targets), dtype=torch.float32)
        for chunk in chunks(len(targets), chunk_tokens):
            logits = scaled_logits(hidden[chunk], weight[:num_own], None, temperature)
            if num_own:
                sums = row_sums(logits)
                peak[chunk] = _all_reduce(sums.peak.clone(), group, dist.ReduceOp.MAX)
                parts = torch.stack([*sums.seen_from(peak[chunk]), _at_targets(logits, targets[chunk], peak[chunk])])
            else:
                peak[chunk] = _all_reduce(peak.new_full(logits.shape[:1], -torch.inf), group, dist.ReduceOp.MAX)
                parts = peak.new_zeros(3, len(logits))
            total, weighted, at_target = _all_reduce(parts, group, dist.ReduceOp.SUM)
            log_sum[chunk] = total.log()
            logprobs[chunk] = at_target - log_sum[chunk]
            entropy[chunk] = log_sum[chunk] - weighted / total
        ctx.save_for_backward(hidden, weight, targets, peak, log_sum, entropy)
        ctx.temperature, ctx.chunk_tokens, ctx.num_own = temperature, chunk_tokens, num_own
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # two outputs, two gradients
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, peak, log_sum, entropy = ctx.saved_tensors
        rows = weight[: ctx.num_own]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = _weight_gradient(weight) if ctx.needs_input_grad[1] else None
        for chunk in chunks(len(targets), ctx.chunk_tokens):
            logits = scaled_logits(hidden[chunk], rows, None, ctx.temperature)
            grad_logits = grad_of_logits(
                logits,
                targets[chunk],
                peak[chunk] + log_sum[chunk],
                entropy[chunk],
                None if grad_logprobs is None else grad_logprobs[chunk] / ctx.temperature,
                None if grad_entropy is None else grad_entropy[chunk] / ctx.temperature,
                hidden.dtype,
            )
            del logits
            torch.mm(grad_logits, rows.to(hidden.dtype), out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight[: ctx.num_own], grad_logits.t(), hidden[chunk])
        return grad_hidden, _for_autograd(weight, grad_weight), None, None, None, None, None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(tensor, operation, group=group)
    return tensor


def _at_targets(logits: Tensor, targets: Tensor, peak: Tensor) -> Tensor:
    """Return [n] distances below the peak of the logits of this rank's targets; 0 for others."""
    own = (targets >= 0) & (targets < logits.size(1))
    return torch.where(own, logits.gather(1, targets.where(own, 0)[:, None])[:, 0] - peak, 0.0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left @ right in float32, whatever the precision of the factors."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left.float() @ right.float()


def _weight_gradient(weight: Tensor) -> Tensor:
    """Return [V' / tp, E] float32 to add the gradient to."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.dtype == torch.float32:
        return main_grad
    return torch.zeros_like(weight, dtype=torch.float32)


def _for_autograd(weight: Tensor, grad_weight: Tensor | None) -> Tensor | None:
    """Return what autograd receives as the weight's gradient.

    If the gradient is already in `main_grad`, return a tensor to call Megatron's hooks with, which add it only to embeddings' gradients of
    the same weight (megatron/core/distributed/distributed_data_parallel.py, `_make_backward_post_hook`).
    """
    if grad_weight is None:
        return None
    if grad_weight is not getattr(weight, "main_grad", None):
        return grad_weight.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


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
    if grad_entropy is not None:
        slope = slope - (log_softmax + entropy[:, None]) * grad_entropy[:, None]
    return (log_softmax.exp() * slope).to(dtype)


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {
    pass_: torch.compile(pass_, dynamic=True) for pass_ in (_row_sums, _grad_without_targets)
}
"""Nothing is compiled before the first call. The last chunk of a batch is shorter than the others: one kernel serves all lengths."""


def _compiled_on_gpu(pass_: Callable[..., Any], logits: Tensor) -> Callable[..., Any]:
    """Run a pass, compiled on GPUs, where moving the logits to and from memory takes the time."""
    return _COMPILED[pass_] if logits.is_cuda else pass_
