"""Weights of a model: sharded over the ranks, and by name, gathered from the ranks one parameter at a time."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from fuligo.models.adapter import base_tensors
from fuligo.models.gated_delta import DECAY_RATES
from fuligo.models.quantised_linear import QuantisedWeight, quantised_weights
from fuligo.models.transformers_types import text_config
from fuligo.trainer.ranks.world import World


def shard(
    policy: nn.Module, layers: Sequence[nn.Module], world: World, *, half_precision: bool, whole: Set[nn.Parameter] = frozenset()
) -> None:
    """Shard the model with FSDP2, a unit for each layer and one for the rest, in place.

    Weights stay float32; with `half_precision` a unit is gathered and computes in bfloat16. Gradients are summed over ranks in
    float32, not averaged: the loss is already a share of the global batch's.

    Args:
        whole: frozen parameters that are not sharded and stay the same objects, in the data type that they are used in
    """
    mesh: DeviceMesh = init_device_mesh(world.device.type, (world.size,))
    dtype = torch.bfloat16 if half_precision else None
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    ignored = set(whole)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed_precision, ignored_params=ignored)
    fully_shard(policy, mesh=mesh, mp_policy=mixed_precision, reshard_after_forward=False, ignored_params=ignored)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


HeldTensor: TypeAlias = Tensor | QuantisedWeight
"""Parameter or saved buffer, or the module that holds a quantized weight instead of it."""


def full_tensor(tensor: HeldTensor) -> Tensor:
    """Return the whole of a parameter, gathered from all ranks if it is sharded, dequantized if it is quantized. A collective."""
    if isinstance(tensor, QuantisedWeight):
        return tensor.weight
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # A gather takes a tenth of a millisecond even on one rank, and an adapter has hundreds of tensors.
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of `full`, placed as `like` is."""
    if isinstance(like, DTensor):
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return full.to(like.device)


def weight_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and saved buffers by the names that transformers gives them; tied weights once, under their first name.

    Those of an adapter are left out, and quantized ones.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in base_tensors(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def held_tensors(model: PreTrainedModel) -> dict[str, HeldTensor]:
    """Return what `weight_tensors` does, and quantized weights by the modules that hold them."""
    return {**weight_tensors(model), **quantised_weights(model)}


def keeps_dtype(name: str, tensor: HeldTensor) -> bool:
    """Return whether a tensor is sent in the data type in which it is held, whatever that of the others.

    Of buffers models have one, the correction of a router's scores: it selects experts by differences that bfloat16 would round away.
    SGLang holds the decay rates of Gated DeltaNet in float32, and Qwen3.5's files have them so.
    """
    return not isinstance(tensor, (nn.Parameter, QuantisedWeight)) or name.endswith(DECAY_RATES)


def named_weights(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors, without an adapter's; floating-point parameters are cast to `dtype`.

    A collective if the model is sharded: every rank iterates to the end. A tensor may be the model's own memory: callers must neither
    change nor keep it.
    """
    for name, tensor in held_tensors(model).items():
        full = full_tensor(tensor)
        is_cast = dtype is not None and full.is_floating_point() and not keeps_dtype(name, tensor)
        yield name, full.to(dtype) if is_cast else full


@torch.no_grad()
def load_weights(model: PreTrainedModel, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Overwrite the weights, in place, with full tensors of the same names and shapes."""
    load_tensors(weight_tensors(model), named_tensors)


@torch.no_grad()
def load_tensors(tensors: Mapping[str, Tensor], named_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Overwrite live tensors, by their names, with full ones of the same shapes."""
    for name, full in named_tensors:
        tensors[name].copy_(shard_like(full.to(tensors[name].dtype), tensors[name]))


@torch.no_grad()
def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Overwrite `target`'s weights with those of `source`, which is the same model with the same sharding, or has an MTP layer too."""
    given = weight_tensors(source)
    for name, ours in weight_tensors(target).items():
        ours.copy_(given[name])


def checkpoint_dtype(config) -> torch.dtype:
    """Return the data type of a checkpoint's weights; float32 if its config names none."""
    dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
