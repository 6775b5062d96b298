"""RMSNorm in half the passes over memory that transformers' modules take on a CPU, where they are an eighth of a training step."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TOLERANCE = 1e-6


def speed_up_rms_norms(model: nn.Module) -> int:
    """Give every RMSNorm of `model` that computes w * x / rms(x) a faster forward for float32 on a CPU; elsewhere its own stays.

    A module is taken by what it computes, not by its name alone: one that scales otherwise (by 1 + w, say) is left as it is.

    Returns:
        The number of modules changed.
    """
    changed = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module._plain_forward = module.forward  # pyright: ignore[reportArgumentType]  # a bound method, not a parameter
            module.forward = MethodType(_forward, module)
            changed += 1
    return changed


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.dtype != torch.float32 or weight.is_cuda or not isinstance(eps, float):
        return False
    x = torch.linspace(-2.0, 3.0, 3 * len(weight)).view(3, -1)
    return torch.allclose(module(x), _RmsNorm.apply(x, weight, eps), rtol=TOLERANCE, atol=TOLERANCE)  # pyright: ignore[reportArgumentType]


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != torch.float32 or hidden_states.is_cuda or self.weight.dtype != torch.float32:
        return self._plain_forward(hidden_states)
    return _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # pyright: ignore[reportReturnType]


class _RmsNorm(torch.autograd.Function):
    """y = w * n with n = x / rms(x); dx = (w * dy - n * mean(w * dy * n)) / rms(x)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * inverse_rms
        ctx.save_for_backward(normed, weight, inverse_rms)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normed, weight, inverse_rms = ctx.saved_tensors
        buffer = grad * normed  # fresh memory costs more than arithmetic: one buffer serves all that follows
        grad_weight = buffer.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        projection = (buffer @ weight).div_(weight.shape[0])[..., None]
        torch.mul(grad, weight, out=buffer)
        return buffer.addcmul_(normed, projection, value=-1).mul_(inverse_rms), grad_weight, None
