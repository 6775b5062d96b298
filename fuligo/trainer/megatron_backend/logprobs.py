"""Log-probabilities and entropies of response tokens with a vocabulary split over the TP ranks. Logits never leave their rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuligo.trainer.logprobs import TokenLogprobs, add_product, chunks, grad_of_logits, row_sums, scaled_logits


def vocab_parallel_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk_tokens: int, num_vocab: int, tp_group: dist.ProcessGroup
) -> TokenLogprobs:
    """Compute the log-probabilities of `targets` and the entropies of their distributions; both are differentiable.

    Every rank of `tp_group` calls this with the same tokens and gets the same values. The gradient of `hidden` is this rank's part of a sum
    over the ranks; the region that `hidden` comes from (`copy_to_tensor_model_parallel_region`) adds the parts up. The gradient of `weight`
    is added in float32 directly to its `main_grad`, if Megatron's data parallelism has given it a float32 one.

    Peak memory beyond inputs and gradients is a few [chunk_tokens, V / tp] float32 tensors in either pass, because the backward pass
    recomputes the logits of each chunk.

    Args:
        hidden: [N, E] hidden state *before* each target: position t - 1 predicts token t.
        weight: [V' / tp, E] this rank's rows of the output layer; V' is the size of the vocabulary with padding.
        targets: [N] int64 target tokens.
        chunk_tokens: number of tokens whose logits are in memory at a time.
        num_vocab: V, the size of the vocabulary; padding has no probability and no gradient.
    """
    first = dist.get_rank(tp_group) * weight.size(0)
    num_own = max(0, min(weight.size(0), num_vocab - first))
    return TokenLogprobs(*_VocabParallelLogprobs.apply(hidden, weight, targets - first, temperature, chunk_tokens, num_own, tp_group))


def gather_predictions(local: TokenLogprobs, local_ids: Tensor, num_total: int, cp_group: dist.ProcessGroup) -> TokenLogprobs:
    """Gather log-probabilities and entropies like `gather_tokens`, in one collective."""
    if cp_group.size() == 1:
        return local
    return TokenLogprobs(*_GatherTokens.apply(torch.stack(local), local_ids, num_total, cp_group).unbind())


def gather_tokens(local: Tensor, local_ids: Tensor, num_total: int, cp_group: dist.ProcessGroup) -> Tensor:
    """Gather a micro-batch's [..., N] values on all context-parallel ranks, each of which has computed a part.

    Every rank then computes the same loss; in the backward pass, a rank gets the gradient of its part.

    Args:
        local: [..., n] this rank's values.
        local_ids: [n] indices of these values among the N; each index is on exactly one rank.
        num_total: N.
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (local_ids,) = ctx.saved_tensors
        return grad[..., local_ids], None, None, None


class _VocabParallelLogprobs(torch.autograd.Function):
    """Autograd function of `vocab_parallel_logprobs`. `targets` count from this rank's first row; rows from `num_own` on are padding."""

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
    def backward(  # pyrefly: ignore[bad-override]  # two outputs, two gradients
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
                add_product(grad_weight[: ctx.num_own], grad_logits.t(), hidden[chunk])
        return grad_hidden, _for_autograd(weight, grad_weight), None, None, None, None, None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(tensor, operation, group=group)
    return tensor


def _at_targets(logits: Tensor, targets: Tensor, peak: Tensor) -> Tensor:
    """Return the [n] logits of the targets minus the peak; 0 for targets of other ranks."""
    own = (targets >= 0) & (targets < logits.size(1))
    return torch.where(own, logits.gather(1, targets.where(own, 0)[:, None])[:, 0] - peak, 0.0)


def _weight_gradient(weight: Tensor) -> Tensor:
    """Return the [V' / tp, E] float32 tensor to add the gradient to: `main_grad` if it has this type, else zeros."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.dtype == torch.float32:
        return main_grad
    return torch.zeros_like(weight, dtype=torch.float32)


def _for_autograd(weight: Tensor, grad_weight: Tensor | None) -> Tensor | None:
    """Return the weight's gradient for autograd.

    If the gradient is already in `main_grad`, return a placeholder that triggers Megatron's hooks. They ignore its values, except if the
    weight is tied to the embedding in the same stage: autograd then adds the placeholder to the embedding's gradient, so it must be 0
    (megatron/core/distributed/distributed_data_parallel.py, `_make_backward_post_hook`).
    """
    if grad_weight is None:
        return None
    if grad_weight is not getattr(weight, "main_grad", None):
        return grad_weight.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # pyrefly: ignore[missing-attribute]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
