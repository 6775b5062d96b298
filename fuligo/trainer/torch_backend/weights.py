"""Weights of a model: sharding over the ranks, and named full tensors that are gathered one parameter at a time."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_utils import PreTrainedModel

from fuligo.models.adapter import base_tensors
from fuligo.models.gated_delta import DECAY_RATES
from fuligo.models.quantized_linear import QuantizedWeight, quantized_weights
from fuligo.models.transformers_types import text_config
from fuligo.trainer.ranks.world import World


def shard(
    policy: nn.Module, layers: Sequence[nn.Module], world: World, *, half_precision: bool, whole: Set[nn.Parameter] = frozenset()
) -> None:
    """Shard the model in place with FSDP2: one unit per layer and one for the rest.

    Weights stay in float32; with `half_precision`, units are gathered and compute in bfloat16. Gradients are summed over ranks in float32,
    not averaged, because each rank's loss is already its share of the global batch's loss.

    Args:
        whole: frozen parameters that are not sharded or cast and remain the same objects.
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


HeldTensor: TypeAlias = Tensor | QuantizedWeight
"""Parameter, saved buffer, or module that holds a quantized weight."""


def full_tensor(tensor: HeldTensor) -> Tensor:
    """Return the full tensor: gathered from all ranks if it is sharded, dequantized if it is quantized. A collective."""
    if isinstance(tensor, QuantizedWeight):
        return tensor.weight
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # A gather takes a tenth of a millisecond even on one rank, and an adapter has hundreds of tensors.
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `full`, with the placement and device of `like`."""
    if isinstance(like, DTensor):
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return full.to(like.device)


def weight_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and saved buffers by their names in transformers; tied weights once, under their first name.

    Tensors of an adapter and quantized weights are left out.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in base_tensors(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def held_tensors(model: PreTrainedModel) -> dict[str, HeldTensor]:
    """Return the tensors of `weight_tensors`, and the modules that hold quantized weights, by name."""
    return {**weight_tensors(model), **quantized_weights(model)}


def keeps_dtype(name: str, tensor: HeldTensor) -> bool:
    """Return whether a tensor is sent in its current data type, whatever the data type of the sync.

    These are buffers (such as a router's correction bias, because bfloat16 would round away differences that decide between experts) and
    the decay rates of Gated DeltaNet, which SGLang and Qwen3.5's files hold in float32.
    """
    return not isinstance(tensor, (nn.Parameter, QuantizedWeight)) or name.endswith(DECAY_RATES)


def named_weights(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors except those of an adapter; floating-point tensors are cast to `dtype` unless `keeps_dtype`.

    A collective if the model is sharded: every rank must iterate to the end. A tensor may share the model's memory, so callers must neither
    change nor keep it.
    """
    for name, tensor in held_tensors(model).items():
        full = full_tensor(tensor)
        is_cast = dtype is not None and full.is_floating_point() and not keeps_dtype(name, tensor)
        yield name, full.to(dtype) if is_cast else full


@torch.no_grad()
def load_tensors(tensors: Mapping[str, Tensor], named_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copy full tensors into the tensors of the same names and shapes, which may be sharded."""
    for name, full in named_tensors:
        tensors[name].copy_(shard_like(full.to(tensors[name].dtype), tensors[name]))


@torch.no_grad()
def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the weights of `source` to `target`, the same model with the same sharding; `source` may also have an MTP layer."""
    given = weight_tensors(source)
    for name, ours in weight_tensors(target).items():
        ours.copy_(given[name])


def checkpoint_dtype(config) -> torch.dtype:
    """Return the data type of a checkpoint's weights according to its config; float32 if the config has none."""
    dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
