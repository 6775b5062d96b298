"""Weights of this rank by canonical names, which depend neither on the layout nor on the implementation of the layers."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fuligo.models.adapter_names import ADAPTER_MODULE, AdapterNames
from fuligo.models.names import ModelNames


@dataclass(slots=True, frozen=True)
class RankGroups:
    """Process groups of this rank's parallel dimensions."""

    tensor: ProcessGroup
    """Tensor-parallel ranks, which split matrices."""
    expert_tensor: ProcessGroup
    """Expert-tensor-parallel ranks, which split the matrices of each expert."""
    expert: ProcessGroup
    """Expert-parallel ranks, each with different experts."""
    experts: ProcessGroup
    """Ranks that together hold all experts, ordered by rank in `expert`, then by rank in `expert_tensor`."""
    pipeline: ProcessGroup
    """Pipeline-parallel ranks, each with different stages."""
    context: ProcessGroup
    """Context-parallel ranks, which split sequences."""
    model: ProcessGroup
    """Tensor- and pipeline-parallel ranks of a replica with the same context-parallel rank."""
    copies: ProcessGroup
    """Data- and context-parallel ranks, which hold equal copies of weights other than experts."""
    expert_copies: ProcessGroup
    """Ranks that hold equal copies of experts."""


def rank_groups() -> RankGroups:
    return RankGroups(
        tensor=_group(parallel_state.get_tensor_model_parallel_group()),
        expert_tensor=_group(parallel_state.get_expert_tensor_parallel_group()),
        expert=_group(parallel_state.get_expert_model_parallel_group()),
        experts=_group(parallel_state.get_expert_tensor_and_model_parallel_group()),
        pipeline=_group(parallel_state.get_pipeline_model_parallel_group()),
        context=_group(parallel_state.get_context_parallel_group()),
        model=_group(parallel_state.get_model_parallel_group()),
        copies=_group(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert_copies=_group(parallel_state.get_expert_data_parallel_group()),
    )


def _group(group: object) -> ProcessGroup:
    assert isinstance(group, ProcessGroup)
    return group


_FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
"""TransformerEngine's linear layer that contains the weight of a norm -> the norm in a model of local layers."""

_ADAPTER = f".{ADAPTER_MODULE}."
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_FUSED_NORM = re.compile(rf"\.({'|'.join(re.escape(name) for name in _FUSED_NORMS)})\.layer_norm_weight$")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_LOCAL_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)(\d+)(?=\.)")


def canonical_name(name: str, *, first_layer: int = 0, first_expert: int = 0) -> str:
    """Return the canonical name of a weight: its name in an unsplit model of local layers.

    Args:
        name: name in the stage's model, which has local or TransformerEngine layers.
        first_layer: index of the stage's first layer, counted from 0 over all stages.
        first_expert: index of the rank's first expert.
    """
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    name = _FUSED_NORM.sub(lambda match: f".{_FUSED_NORMS[match[1]]}.weight", name)
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)
    return _LOCAL_EXPERT.sub(lambda match: str(int(match[1]) + first_expert), name)


def local_weights(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return this rank's parts of the weights by canonical name: parameters, and the expert bias of routers, which is a buffer.

    Stages may be bare or wrapped (for example in DistributedDataParallel). Tensors of an adapter are left out.
    """
    return {name: tensor for name, tensor in _local_tensors(chunks) if _ADAPTER not in name}


def local_adapter(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return this rank's parts of the adapter by canonical name; empty if the model has none."""
    return {name: tensor for name, tensor in _local_tensors(chunks) if _ADAPTER in name}


def tensors_of(chunks: Sequence[nn.Module], names: ModelNames) -> dict[str, Tensor]:
    """Return this rank's parts of the tensors in `names`: the weights of the model, or its adapter."""
    return local_adapter(chunks) if isinstance(names, AdapterNames) else local_weights(chunks)


def linear_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield this rank's modules with a `weight` parameter, each with the canonical name of the weight."""
    for chunk in map(unwrapped, chunks):
        canonical = _canonical(chunk)
        for name, module in chunk.named_modules():
            if isinstance(getattr(module, "weight", None), nn.Parameter):
                yield canonical(f"{name}.weight"), module


def expert_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield this rank's layers of routed experts by canonical name."""
    for chunk in map(unwrapped, chunks):
        canonical = _canonical(chunk)
        for name, module in chunk.named_modules():
            if isinstance(module, MoELayer):
                yield canonical(f"{name}.experts"), module.experts


def first_local_expert(num_experts: int) -> int:
    """Return the index of this rank's first expert."""
    expert_ranks = rank_groups().expert
    return num_experts // expert_ranks.size() * expert_ranks.rank()


def _local_tensors(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for chunk in map(unwrapped, chunks):
        canonical = _canonical(chunk)
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))
        for name, tensor in (*chunk.named_parameters(), *biases):
            yield canonical(name), tensor


def _canonical(chunk: Any) -> Callable[[str], str]:
    """Return the function that maps names in a stage to canonical names."""
    first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
    return partial(canonical_name, first_layer=first_layer, first_expert=first_local_expert(chunk.config.num_moe_experts or 0))


def misfits(local: Mapping[str, Tensor], names: ModelNames) -> list[str]:
    """Return the weights of this rank's layers and experts that only `local` or only `names` contains."""
    layers = {name for name in map(_layer, local) if name is not None}
    experts = {weight.expert for name in local if (weight := names.by_megatron_name.get(name)) is not None}
    unknown = [name for name in local if name not in names.by_megatron_name]
    absent = [
        weight.megatron
        for weight in names.weights()
        if _layer(weight.megatron) in layers and (weight.expert is None or weight.expert in experts) and weight.megatron not in local
    ]
    return unknown + absent


def _layer(name: str) -> str | None:
    """Return the layer of a weight, such as `decoder.layers.3` or `mtp.layers.0`; None outside of layers."""
    parts = name.split(".", 3)
    return ".".join(parts[:3]) if len(parts) == 4 and parts[1] == "layers" else None


def unwrapped(chunk: nn.Module) -> Any:
    """Return the model inside its wrappers."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module  # pyrefly: ignore[bad-assignment]
    return chunk
