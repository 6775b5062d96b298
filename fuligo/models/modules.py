"""Adjustments of transformers' modules after loading: aligned weights, epsilon and rotation as in config.json, a faster RMSNorm."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ALIGNMENT_BYTES = 64
TOLERANCE = 1e-6
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


@torch.no_grad()
def align_weights(model: nn.Module) -> None:
    """Copy parameters that are not aligned to 64 bytes into aligned memory; tied parameters stay tied.

    Weights read from a file may be views of its memory map, at any address. MKL guarantees bitwise equal results from run to run for
    aligned operands only (Intel, oneMKL Developer Guide, "Obtaining Numerically Reproducible Results").
    """
    for parameter in model.parameters():
        if not parameter.is_cuda and parameter.data_ptr() % ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone()


def take_stated_epsilon(model: nn.Module) -> int:
    """Set the epsilon of the latent norms (MLA, arXiv 2405.04434) to config.json's rms_norm_eps and return the number of modules changed.

    SGLang 0.5.15.post1 (models/deepseek_v2.py) and Megatron-Core 0.16.1 (transformer/multi_latent_attention.py) use that value.
    transformers 5.12.1 always uses 1e-6 there; GLM-4.7-Flash states 1e-5.
    """
    config: Any = model.config
    norms: list[Any] = [module for name, module in model.named_modules() if name.endswith(_LATENT_NORMS)]
    changed = [norm for norm in norms if norm.variance_epsilon != config.rms_norm_eps]
    for norm in changed:
        norm.variance_epsilon = config.rms_norm_eps
    return len(changed)


def take_stated_rotation(model: nn.Module) -> int:
    """Rotate only the first `rotary_dim` elements of each head, as config.json states, and return the number of modules changed.

    SGLang 0.5.15.post1 (models/minimax_m2.py) reads the key; transformers 5.12.1 does not and rotates whole heads. MiniMax-M2 states 64 of
    128.
    """
    config: Any = model.config
    rotary_dim: Any = getattr(config, "rotary_dim", None)
    head_dim, rope = getattr(config, "head_dim", None), getattr(config, "rope_parameters", None)
    if not isinstance(rotary_dim, int) or not isinstance(head_dim, int) or not isinstance(rope, dict):
        return 0
    if rope.get("rope_type") != "default" or "partial_rotary_factor" in rope:
        return 0
    config.rope_parameters = {**rope, "partial_rotary_factor": rotary_dim / head_dim}
    embeddings: list[Any] = [module for module in model.modules() if hasattr(module, "compute_default_rope_parameters")]
    changed = [embedding for embedding in embeddings if 2 * len(embedding.inv_freq) != rotary_dim]
    for embedding in changed:
        embedding.inv_freq, _ = embedding.compute_default_rope_parameters(config, embedding.inv_freq.device)
        embedding.original_inv_freq = embedding.inv_freq.clone()
    return len(changed)


def speed_up_rms_norms(model: nn.Module) -> int:
    """Replace the float32 CPU forward of every RMSNorm that computes w * x / rms(x), and return the number of modules changed.

    The replacement makes half as many passes over memory; transformers' modules take an eighth of a training step on a CPU. Modules that
    compute something else (scaling by 1 + w, for example) are detected by their output and left unchanged.
    """
    changed = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module._plain_forward = module.forward  # pyrefly: ignore[bad-argument-type]  # a bound method, not a parameter
            module.forward = MethodType(_forward, module)
            changed += 1
    return changed


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.dtype != torch.float32 or weight.is_cuda or not isinstance(eps, float):
        return False
    x = torch.linspace(-2.0, 3.0, 3 * len(weight)).view(3, -1)
    return torch.allclose(module(x), _RmsNorm.apply(x, weight, eps), rtol=TOLERANCE, atol=TOLERANCE)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != torch.float32 or hidden_states.is_cuda or self.weight.dtype != torch.float32:
        return self._plain_forward(hidden_states)
    if not torch.is_grad_enabled():  # a call of an autograd function takes as long as the arithmetic of a few rows
        return _normed(hidden_states, self.variance_epsilon)[0].mul_(self.weight)
    return _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x), and 1 / rms(x) with a last dimension of 1."""
    inverse_rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * inverse_rms, inverse_rms


class _RmsNorm(torch.autograd.Function):
    """RMSNorm: y = w * n with n = x / rms(x); dx = (w * dy - n * mean(w * dy * n)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse_rms = _normed(x, eps)
        ctx.save_for_backward(normed, weight, inverse_rms)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyrefly: ignore[bad-override]
        normed, weight, inverse_rms = ctx.saved_tensors
        buffer = grad * normed  # allocation costs more than arithmetic, so one buffer is reused below
        grad_weight = buffer.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        projection = (buffer @ weight).div_(weight.shape[0])[..., None]
        torch.mul(grad, weight, out=buffer)
        return buffer.addcmul_(normed, projection, value=-1).mul_(inverse_rms), grad_weight, None
