"""Differentiable operations on GPUs, with the kernels of `models.invariant_kernels`: a row's result depends only on that row."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def kernels() -> Any:
    """Return the module of GPU kernels, imported only on use: torch builds for CPUs lack triton."""
    from fuligo.models import invariant_kernels

    return invariant_kernels


def expert_kernels() -> Any:
    """Return the module of GPU kernels for experts."""
    from fuligo.models import invariant_expert_kernels

    return invariant_expert_kernels


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up on a GPU, [..., K], rounded once."""
    result: Tensor = _SwiGlu.apply(gate, up)
    return result


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernels().swiglu(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        rows = (each.flatten(0, -2).contiguous() for each in (*ctx.saved_tensors, grad))
        of_gate, of_up = kernels().swiglu_backward(*rows)
        return of_gate.view(grad.shape), of_up.view(grad.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, H, D] by rotary embeddings `cos` and `sin` [T, D], whose two halves are equal, on a GPU."""
    result: Tensor = _Rotate.apply(x, cos, sin)
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels().rotate(x, torch.arange(len(x), device=x.device), cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        cos, sin = ctx.saved_tensors
        rows = torch.arange(len(grad), device=grad.device)
        return kernels().rotate(grad.contiguous(), rows, cos, sin, backward=True), None, None


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, slots: Tensor, *, longest: int, scale: float
) -> Tensor:
    """Return the output [T, H, D] of `invariant_kernels.attention` on a GPU, without gradient."""
    out = query.new_empty(query.shape)
    kernels().attention(query, key, value, query_starts, key_starts, slots, longest=longest, scale=scale, out=out)
    return out


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts with `invariant_expert_kernels.route` on a GPU; return their weights [T, K] float32 and indices [T, K] int32."""
    weights, chosen = _Route.apply(logits, top_k, renormalize)
    return weights, chosen


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights, chosen = expert_kernels().route(logits, top_k, renormalize=renormalize)
        ctx.save_for_backward(logits, chosen)
        ctx.renormalize = renormalize
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        logits, chosen = ctx.saved_tensors
        with torch.enable_grad():
            inputs = logits.detach().requires_grad_()
            weights = inputs.float().softmax(-1).gather(1, chosen.long())
            if ctx.renormalize:
                weights = weights / weights.sum(-1, keepdim=True)
            return torch.autograd.grad(weights, inputs, grad)[0], None, None


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, *, ranks: int = 1) -> Tensor:
    """Return the output [T, H] of `invariant_expert_kernels.experts` on a GPU."""
    result: Tensor = _Experts.apply(x, gate_up, down, weights, chosen, ranks)
    return result


class _Experts(torch.autograd.Function):
    """Experts of an MoE layer; the backward pass uses torch's grouped matrix products.

    The gradient of a choice's weight, <dy, W2 a>, is computed as <W2' dy, a>, so that the experts' outputs need not be kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, ranks: int) -> Tensor:
        done = expert_kernels().experts(x, gate_up, down, weights, chosen, swiglu=kernels().swiglu, ranks=ranks)
        ctx.save_for_backward(x, gate_up, down, weights, *done.rows, done.gate_up)
        return done.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, gate_up, down, weights, starts, tokens, places, hidden = ctx.saved_tensors
        of_x, of_gate_up, of_down, of_weights = ctx.needs_input_grad[:4]
        ends = starts[1:]
        gate, up = (each.contiguous() for each in hidden.chunk(2, -1))
        active = kernels().swiglu(gate, up)
        factors = torch.empty_like(places, dtype=grad.dtype)
        factors[places] = weights.flatten().to(grad.dtype)  # exact: `route` rounds them to the model's dtype
        grads = grad.index_select(0, tokens)
        back = F.grouped_mm(grads, down, offs=ends)
        grad_weights = (back * active).sum(-1, dtype=torch.float32)[places].view_as(weights) if of_weights else None
        grad_down = F.grouped_mm((grads * factors[:, None]).t(), active, offs=ends) if of_down else None
        back = back * factors[:, None]
        grad_hidden = torch.cat(kernels().swiglu_backward(gate, up, back), -1)
        grad_gate_up = F.grouped_mm(grad_hidden.t(), x.index_select(0, tokens), offs=ends) if of_gate_up else None
        grad_x = None
        if of_x:
            parts = F.grouped_mm(grad_hidden, gate_up, offs=ends)[places]
            grad_x = parts.view(*weights.shape, -1).sum(1)
        return grad_x, grad_gate_up, grad_down, grad_weights, None, None
