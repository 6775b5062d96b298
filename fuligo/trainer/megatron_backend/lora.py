"""LoRA on Megatron's parallel linear layers: every matrix of the Hugging Face checkpoint has a separate A and B, as in PEFT.

For a layer that splits its outputs over the TP ranks, A is replicated and B is split; for a layer that splits its inputs, A is split and B
is replicated. Between A and B, the ranks exchange `rank` numbers per token and matrix.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn

from fuligo.formats.weight_manifest import MergeRounding
from fuligo.models.adapter import read_adapter_weights, require_shapes
from fuligo.models.adapter_names import ADAPTER_MODULE, AdaptedMatrix, AdapterNames, ExpertsFactor
from fuligo.models.names import Form, ModelNames, Weight
from fuligo.trainer.megatron_backend.experts_lora import ExpertsAdapter, Update, add_experts_adapters, add_to_output
from fuligo.trainer.megatron_backend.parts import held_weights
from fuligo.trainer.megatron_backend.weights.export import named_weights
from fuligo.trainer.megatron_backend.weights.forms import experts_from_peft, qkv_group_sizes
from fuligo.trainer.megatron_backend.weights.local import linear_layers, local_weights, rank_groups, unwrapped
from fuligo.trainer.ranks.world import World


class LinearAdapter(nn.Module):
    """Low-rank updates of the matrices that are joined in one of Megatron's linear layers.

    Args:
        linear: adapted layer, which holds this rank's part of the weight.
        matrices: adapted matrices, in the order of the layer's outputs.
    """

    def __init__(self, linear: nn.Module, matrices: Sequence[AdaptedMatrix], names: AdapterNames, *, sequence_parallel: bool) -> None:
        super().__init__()
        config, weight = names.adapter, cast(Tensor, linear.weight)
        whole = matrices[0].weight
        self._group = rank_groups().tensor
        self._split_axis = None if tuple(weight.shape) == whole.shape else whole.axis or 0
        """Dimension of the layer's weight that is split over the TP ranks: 0 (outputs) or 1 (inputs); None: it is whole on each."""
        self._sequence_parallel = sequence_parallel
        self._kinds = [matrix.kind for matrix in matrices]
        self._rank, self._scaling, self._dropout = config.rank, config.scaling, config.dropout
        self._outputs = _Outputs.of(whole, len(weight), names)
        self.is_on, self.drops = True, False
        for matrix in matrices:
            for factor, tensor in (("A", matrix.a(config.rank)), ("B", matrix.b(config.rank))):
                axis = self._split_axis if (factor, self._split_axis) in (("B", 0), ("A", 1)) else None
                shape = [size // self._group.size() if dim == axis else size for dim, size in enumerate(tensor.shape)]
                parameter = nn.Parameter(torch.zeros(shape, device=weight.device))  # float32, as in PEFT
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, axis is not None, axis or 0, 1)
                # Under sequence parallelism a replicated factor sees only this rank's tokens, so Megatron must sum its gradient over TP.
                parameter.sequence_parallel = sequence_parallel and axis is None  # pyrefly: ignore[missing-attribute]
                self.register_parameter(f"{matrix.kind}_{factor}", parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the update of the layer's output, [tokens, ..., local outputs], from the layer's input."""
        a = torch.cat([self._factor(kind, "A") for kind in self._kinds]).to(inputs.dtype)
        hidden = self._exchange(F.linear(self._dropped(inputs), a)) * self._scaling
        parts = zip(self._kinds, hidden.split(self._rank, dim=-1), strict=True)
        return self._outputs.join({kind: F.linear(part, self._factor(kind, "B").to(inputs.dtype)) for kind, part in parts})

    def update(self) -> Update:
        """Return the update of this rank's part of the layer's weight."""
        num_elements = sum(len(self._factor(kind, "B")) * self._factor(kind, "A").shape[1] for kind in self._kinds)
        holds_own_part = self._split_axis is not None or self._group.rank() == 0
        return Update(self._difference, num_elements, is_first_copy=holds_own_part and rank_groups().copies.rank() == 0)

    @torch.no_grad()
    def _difference(self) -> Tensor:
        updates = {kind: (self._factor(kind, "B") @ self._factor(kind, "A")).T for kind in self._kinds}
        return self._outputs.join(updates).T * self._scaling

    def _factor(self, kind: str, factor: str) -> Tensor:
        return self.get_parameter(f"{kind}_{factor}")

    def _exchange(self, hidden: Tensor) -> Tensor:
        """Exchange the products of A and the inputs, [tokens, ..., R], over the TP ranks, so that they and their gradients are complete."""
        group = self._group
        if self._split_axis is None or group.size() == 1:
            return hidden
        if self._split_axis == 0:
            if self._sequence_parallel:
                return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
            return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        if self._sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden, group=group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden, group=group)

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not (self.drops and self._dropout):
            return inputs
        if self._split_axis != 1 and not self._sequence_parallel:  # replicated inputs need the same mask on all ranks
            return F.dropout(inputs, self._dropout)
        with cast(Any, get_cuda_rng_tracker()).fork():
            return F.dropout(inputs, self._dropout)


def add_adapters(chunks: Sequence[nn.Module], names: AdapterNames, *, seed: int) -> None:
    """Add adapters to this rank's linear layers and experts in place, and freeze all other parameters. Call before wrapping the stages.

    B starts at zero, so the outputs do not change. The initial values of A do not depend on the layout.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
    for name, linear in list(linear_layers(chunks)):
        if matrices := names.by_matrix.get(name):
            adapter = LinearAdapter(linear, matrices, names, sequence_parallel=unwrapped(chunks[0]).config.sequence_parallel)
            linear.add_module(ADAPTER_MODULE, adapter)
            # TransformerEngine would refuse the adapter's float32: at its first call a layer compares the types of parameters and input.
            if hasattr(linear, "activation_dtype"):
                cast(Any, linear).activation_dtype = cast(Tensor, linear.weight).dtype
            add_to_output(linear, adapter, adapter)
    add_experts_adapters(chunks, names)
    for chunk in map(unwrapped, chunks):
        if chunk.pre_process and chunk.config.recompute_granularity is not None:
            chunk.embedding.register_forward_hook(_with_gradient)
    set_adapter(chunks, names, lambda weight: _first_values(weight, seed))


@torch.no_grad()
def set_adapter(chunks: Sequence[nn.Module], names: AdapterNames, whole: Callable[[Weight], Tensor]) -> None:
    """Copy this rank's parts of the adapter from full tensors, which `whole` returns for each weight."""
    for held in held_weights(chunks, names):
        values = whole(held.weight)
        for part in held.parts:
            shard = part.shard
            shard.data.copy_(values[tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.data.shape))])


def adapters(chunks: Sequence[nn.Module]) -> Iterator[LinearAdapter | ExpertsAdapter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, (LinearAdapter, ExpertsAdapter)))


def local_updates(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Update]]:
    """Yield the canonical names and updates of this rank's adapted matrices."""
    for name, linear in linear_layers(chunks):
        if isinstance(adapter := getattr(linear, ADAPTER_MODULE, None), LinearAdapter):
            yield name, adapter.update()
    for adapter in adapters(chunks):
        if isinstance(adapter, ExpertsAdapter):
            yield from adapter.updates()


def adapter_off(chunks: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Disable the adapter inside the block."""
    return _switched(list(adapters(chunks)), "is_on", value=False)


def dropout_on(chunks: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Apply dropout to the inputs of A inside the block. PEFT defines no dropout for experts."""
    return _switched([adapter for adapter in adapters(chunks) if isinstance(adapter, LinearAdapter)], "drops", value=True)


@contextmanager
def _switched(modules: Sequence[nn.Module], switch: str, *, value: bool) -> Iterator[None]:
    for module in modules:
        setattr(module, switch, value)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, switch, not value)


def _with_gradient(embedding: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Make embedded tokens require a gradient: with recomputation, Megatron computes no parameter gradients if no input requires one."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _first_values(weight: Weight, seed: int) -> Tensor:
    """Return initial values: zeros for B, and for A PEFT's distribution (`kaiming_uniform_` with a = sqrt 5), seeded by seed and name."""
    (name,) = weight.checkpoint
    if name.endswith(".lora_B.weight"):
        return torch.zeros(weight.shape)
    number = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "big")
    bound = weight.shape[1] ** -0.5
    return torch.empty(weight.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))


@dataclass(slots=True, frozen=True)
class _Outputs:
    """Order of a linear layer's outputs on this rank: a sequence of equal groups with some outputs of every joined matrix."""

    kinds: tuple[str, ...]
    """All matrices joined in the layer, including those that are not adapted."""
    sizes: tuple[int, ...]
    """Number of outputs of each matrix in one group."""
    num_groups: int

    @classmethod
    def of(cls, whole: Weight, num_outputs: int, names: AdapterNames) -> Self:
        kinds = tuple(name.removesuffix(".weight").rpartition(".")[2] for name in whole.checkpoint)
        sizes = (num_outputs // len(kinds),) * len(kinds)
        if whole.form is Form.QKV:
            sizes = qkv_group_sizes(names.architecture)
        return cls(kinds, sizes, num_outputs // sum(sizes))

    def join(self, updates: Mapping[str, Tensor]) -> Tensor:
        """Join the updates [..., outputs of a matrix] into [..., outputs of the layer], with zeros for matrices that are not adapted."""
        if len(self.kinds) == 1:
            return updates[self.kinds[0]]
        like = next(iter(updates.values()))
        blocks = [
            updates[kind].unflatten(-1, (self.num_groups, size))
            if kind in updates
            else like.new_zeros((*like.shape[:-1], self.num_groups, size))
            for kind, size in zip(self.kinds, self.sizes, strict=True)
        ]
        return torch.cat(blocks, dim=-1).flatten(-2)


def load_adapter(chunks: Sequence[nn.Module], names: AdapterNames, directory: Path) -> None:
    """Load this rank's parts of the adapter from a PEFT directory.

    Raises CheckpointError if the directory is damaged or does not fit the model.
    """
    tensors = read_adapter_weights(directory)
    shapes = {weight.checkpoint[0]: list(shape) for weight in names.weights() for shape in names.checkpoint_shapes(weight)}
    require_shapes(tensors, shapes, directory)

    def whole(weight: Weight) -> Tensor:
        tensor = tensors[weight.checkpoint[0]]
        return experts_from_peft(weight, tensor) if isinstance(weight, ExpertsFactor) else tensor

    set_adapter(chunks, names, whole)


@dataclass(slots=True)
class AdaptedStages:
    """Policy with a LoRA adapter. Implements `AdaptedPolicy`."""

    chunks: Sequence[nn.Module]
    names: ModelNames
    adapter_names: AdapterNames
    dtype: torch.dtype
    world: World
    rounding: MergeRounding = field(default_factory=MergeRounding)
    """Number of adapted elements in the last `merged`, and how many of them differ from the base weights after rounding."""

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.chunks, self.names, dtype=self.dtype)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.chunks, self.adapter_names, dtype=self.dtype)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors like `named_weights`, with W + scaling B A for adapted layers. A collective.

        Each rank merges its parts before they are gathered. The sums are computed in float32 and rounded once. `rounding` is complete after
        the last tensor.
        """
        weights, updates = local_weights(self.chunks), dict(local_updates(self.chunks))
        rounding = MergeRounding()

        def merged_part(name: str) -> Tensor:
            """Return this rank's part of a weight, merged only now, so that few merged parts exist at a time."""
            nonlocal rounding
            weight, update = weights[name], updates.get(name)
            if update is None:
                return weight
            difference = update.difference()
            merged = (weight.float() + difference).to(self.dtype)
            if self.dtype != torch.float32 and update.is_first_copy and difference.any():
                rounding += MergeRounding(int((merged != weight.to(self.dtype)).sum()), update.num_elements)
            return merged

        yield from named_weights(self.chunks, self.names, dtype=self.dtype, part_of=merged_part)
        counts = torch.tensor([rounding.num_changed, rounding.num_elements], dtype=torch.float64, device=self.world.device)
        self.rounding = MergeRounding(*(int(count) for count in self.world.sum(counts)))
