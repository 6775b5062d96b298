"""AdamW over the trained parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fuligo.trainer.ranks.settings import OptimizerSettings, TrainedParameters
from fuligo.trainer.trained_parameters import trained_names


def freeze_parameters(model: nn.Module, trained: TrainedParameters) -> None:
    """Switch off the gradient of all parameters that are not trained.

    Raises:
        ConfigError: the lists do not fit the model.
    """
    parameters = dict(model.named_parameters())
    chosen = trained_names({name: (name,) for name in parameters}, trained)
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and name in chosen)


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Build AdamW: matrices decay, parameters with fewer axes (norms, biases) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.schedule.peak, betas=settings.betas, eps=settings.eps, fused=True)


def gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the Euclidean norm of all gradients together, over all ranks."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in _parameters(optimizer) if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def apply_step(optimizer: torch.optim.Optimizer, settings: OptimizerSettings, *, step: int, grad_norm: float) -> float:
    """Clip the gradients, update the weights, and drop the gradients; return the learning rate of the 0-based step."""
    lr = settings.schedule.at(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if settings.clip_grad > 0:
        torch.nn.utils.clip_grads_with_norm_(_parameters(optimizer), settings.clip_grad, torch.tensor(grad_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return lr


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
