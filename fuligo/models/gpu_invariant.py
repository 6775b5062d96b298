"""Operations on GPUs whose result for a row depends only on that row, around the kernels of `models.invariant_kernels`."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def kernels() -> Any:
    """Return the module of GPU kernels; torch for CPUs comes without triton."""
    from fuligo.models import invariant_kernels

    return invariant_kernels


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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = (each.flatten(0, -2).contiguous() for each in (*ctx.saved_tensors, grad))
        of_gate, of_up = kernels().swiglu_backward(*rows)
        return of_gate.view(grad.shape), of_up.view(grad.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings [T, D], each half of which has all angles, to [T, H, D] on a GPU."""
    result: Tensor = _Rotate.apply(x, cos, sin)
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels().rotate(x, torch.arange(len(x), device=x.device), cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        rows = torch.arange(len(grad), device=grad.device)
        return kernels().rotate(grad.contiguous(), rows, cos, sin, backward=True), None, None


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return [N] the log of the sum of exp over the rows of [N, V] float32 on a GPU, without gradient."""
    return kernels().log_sum_exp(logits)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, slots: Tensor, *, longest: int, scale: float
) -> Tensor:
    """Return [T, H, D] `invariant_kernels.attention` on a GPU, without gradient."""
    out = query.new_empty(query.shape)
    kernels().attention(query, key, value, query_starts, key_starts, slots, longest=longest, scale=scale, out=out)
    return out
