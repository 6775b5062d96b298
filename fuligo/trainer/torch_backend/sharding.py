"""Sharding of the model over the ranks: fully sharded data parallelism."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fuligo.trainer.ranks.world import World


def shard(policy: nn.Module, layers: Sequence[nn.Module], world: World, *, half_precision: bool) -> None:
    """Shard the model with FSDP2, a unit for each layer and one for the rest, in place.

    Weights stay float32; with `half_precision` a unit is gathered and computes in bfloat16. Gradients are summed over ranks in
    float32, not averaged: the loss is already a share of the global batch's.
    """
    mesh: DeviceMesh = init_device_mesh(world.device.type, (world.size,))
    dtype = torch.bfloat16 if half_precision else None
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed_precision)
    fully_shard(policy, mesh=mesh, mp_policy=mixed_precision, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a parameter, gathered from all ranks if it is sharded. A collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of `full`, placed as `like` is."""
    if isinstance(like, DTensor):
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return full.to(like.device)
