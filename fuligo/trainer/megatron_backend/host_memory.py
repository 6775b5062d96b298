"""Host copies of the reference's and teacher's weights, and the tensors to offload while engines use the device (--colocate)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from fuligo.trainer.megatron_backend.weights.local import local_weights, unwrapped


class HostWeights:
    """Weights of another model of the same architecture, kept in host memory until they are swapped with the weights on the device."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        pinned = torch.cuda.is_available()
        self.tensors: Mapping[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for name, tensor in local_weights(chunks).items()
        }
        self.copy_from(chunks)

    @torch.no_grad()
    def copy_from(self, chunks: Sequence[nn.Module]) -> None:
        for name, tensor in local_weights(chunks).items():
            self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def exchange(self, chunks: Sequence[nn.Module]) -> None:
        """Swap these weights with those of the stages. Calling it twice restores both bit for bit."""
        for name, tensor in local_weights(chunks).items():
            present = tensor.clone()
            tensor.copy_(self.tensors[name])
            self.tensors[name].copy_(present)


def state_tensors(chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> list[Tensor]:
    """Return the weights and buffers of the stages, and all tensors of the optimizer."""
    models = [unwrapped(chunk) for chunk in chunks]
    weights = [tensor.detach() for model in models for tensor in (*model.parameters(), *model.buffers())]
    groups = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    by_parameter = [part.optimizer.state.values() for part in optimizer.chained_optimizers if part.optimizer is not None]
    states = [value for states in by_parameter for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*weights, *groups, *states]


def drop_fp8_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Free TransformerEngine's FP8 copies of the weights. The first micro-batch of the next pass makes new ones."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        getattr(module, "_fp8_workspaces", {}).clear()


def gradient_tensors(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Return the buffers in which gradients are accumulated."""
    buffers: list[Any] = [buffer for chunk in chunks for buffer in (chunk.buffers, chunk.expert_parallel_buffers)]
    return [buffer.grad_data for part in buffers for buffer in part]
