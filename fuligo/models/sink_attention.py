"""Attention with sinks (gpt-oss, arXiv 2508.10925): a learned logit per head joins the softmax denominator and has no value.

A kernel without sinks that also returns the logsumexp L of a query's scores is enough to compute this exactly. With a head's sink s, the
output is sigmoid(L - s) times the kernel's output. The kernel's backward pass recomputes each weight as exp(score - L) and uses the
output: given log(exp L + exp s) in place of L, and the new output, it returns the gradients of queries, keys and values. The gradient of
the sink is minus its weight times the dot product of the output and the output's gradient.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

TORCH_ASKS_FOR_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if torch's varlen kernel has an argument to enable grouped heads; torch 2.11's has none and always supports them."""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """Flash kernel over packed sequences, on CUDA in half precision: query and output [T, H, D], float32 logsumexp of the scores [T, H].

    It calls the forward and backward operators of torch's `varlen_attn` directly, since the logsumexp of `varlen_attn` has no gradient.
    """

    starts: Tensor
    """[S + 1] int32 start of each sequence of queries."""
    key_starts: Tensor
    """[S + 1] int32 start of each sequence of keys."""
    longest: int
    """Largest number of queries of a sequence."""
    longest_keys: int
    """Largest number of keys of a sequence."""
    scale: float
    window: int | None
    """Number of tokens that a token attends to, itself included; None: all tokens up to it."""

    @property
    def _window_size(self) -> list[int]:
        return [-1 if self.window is None else self.window - 1, 0]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        is_grouped = (query.size(1) != key.size(1),) if TORCH_ASKS_FOR_GQA else ()
        out, log_sum_exp, _ = torch.ops.torch_attn._varlen_attn(
            *(query, key, value, self.starts, self.key_starts, self.longest, self.longest_keys, self.window is None, self.scale),
            *(self._window_size, *is_grouped),
        )
        return out, log_sum_exp.transpose(0, 1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return torch.ops.torch_attn._varlen_attn_backward(
            *(grad.contiguous(), query, key, value, out, log_sum_exp.transpose(0, 1).contiguous(), self.starts, self.key_starts),
            *(self.longest, self.longest_keys, self.window is None, no_dropout, self.scale, self._window_size),
        )


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """torch's flash kernel on CPUs: query and output [B, H, L, D], key [B, Hkv, S, D], logsumexp of the scores [B, H, L]."""

    mask: Tensor | None
    """[L, S] added to the scores, -inf where a token does not attend; None: causal."""
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale
        )
        return out, log_sum_exp

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, log_sum_exp, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale
        )


Kernel = VarlenKernel | CpuKernel
"""Attention kernel whose `forward` also returns the logsumexp; `backward` returns the gradients of query, key and value."""


def flash_with_sinks(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """Compute attention with sinks with a kernel that does not support them. `sinks`: logits that broadcast with the kernel's logsumexp."""
    result: Tensor = _FlashWithSinks.apply(query, key, value, sinks, kernel)
    return result


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        out, log_sum_exp = kernel.forward(query, key, value)
        total = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype))
        out = (out * (log_sum_exp - total).exp()[..., None]).to(query.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:  # pyrefly: ignore[bad-override]
        query, key, value, sinks, out, total = ctx.saved_tensors
        gradients = ctx.kernel.backward(grad, query, key, value, out, total)
        weights = (sinks.to(total.dtype) - total).exp()
        of_sinks = -(weights * (grad.to(total.dtype) * out.to(total.dtype)).sum(-1))
        return *gradients, of_sinks.sum_to_size(sinks.shape).to(sinks.dtype), None


def attention_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, scale: float, mask: Tensor | None) -> Tensor:
    """Compute attention with sinks, materializing all scores: query [..., L, D], key [..., S, D], value [..., S, Dv] -> [..., L, Dv].

    `sinks` are logits that broadcast with [..., L]; `mask` is added to the scores [..., L, S]; None: every query sees all keys.
    """
    scores = query @ key.transpose(-1, -2) * scale
    scores = scores if mask is None else scores + mask
    scores = scores if scores.dtype == torch.float64 else scores.float()
    total = torch.logaddexp(scores.logsumexp(-1), sinks.to(scores.dtype))
    return (scores - total[..., None]).exp().to(value.dtype) @ value


def batched_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, scale: float, visible: Tensor | None) -> Tensor:
    """Return [B, H, L, Dv] attention with sinks in sequences of equal length, on devices without a kernel for packed sequences.

    Args:
        query: [B, H, L, D]
        key: [B, Hkv, S, D], with H a multiple of Hkv.
        value: [B, Hkv, S, Dv]
        sinks: [H]
        visible: [L, S] True where the row's token attends to the column's; None: causal.
    """
    is_cpu = query.device.type == "cpu" and query.size(-1) == value.size(-1)
    if visible is None and not is_cpu:
        visible = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
    mask = (
        None if visible is None else torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -torch.inf)
    )
    if is_cpu:
        return flash_with_sinks(CpuKernel(mask, scale), query, key, value, sinks[:, None])
    repeats = query.size(1) // key.size(1)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return attention_with_sinks(query, key, value, sinks[:, None], scale=scale, mask=mask)
