"""LoRA on the experts of Megatron's MoE layers, as defined by PEFT's `target_parameters`: each expert has a separate A and B.

Gate and up projection are adapted as one matrix. For each matrix, the factors A of a rank's experts are stacked in one parameter, and the
factors B in another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from fuligo.models.adapter_names import ADAPTER_MODULE, AdaptedExperts, AdapterNames, ExpertsFactor
from fuligo.models.experts_adapter import low_rank_products
from fuligo.models.names import with_expert
from fuligo.trainer.megatron_backend.weights.local import expert_layers, first_local_expert, rank_groups


class ExpertsAdapter(nn.Module):
    """Low-rank updates of this rank's experts in one layer.

    If an expert's matrix is split over several ranks (expert tensor parallelism), one factor is split in the same way and the other is
    replicated. A rank's update is then split or partial like the output of its part of the matrix, so Megatron's dispatcher sums the two
    together. Only the gradients of replicated factors must be summed over these ranks.

    Args:
        num_local: number of this rank's experts.
        matrices: adapted matrices of the layer.
    """

    def __init__(self, num_local: int, matrices: Sequence[AdaptedExperts], names: AdapterNames, device: torch.device) -> None:
        super().__init__()
        config = names.adapter
        self.num_local, self.is_on = num_local, True
        self._matrices: dict[str, AdaptedExperts] = {matrix.kind: matrix for matrix in matrices}
        self._scaling, self._group = config.scaling, rank_groups().expert_tensor
        for matrix in matrices:
            for factor in matrix.factors(config.rank):
                name = factor.megatron.rpartition(".")[2]
                self.register_parameter(name, _parameter(factor, num_local, self._group.rank(), self._group.size(), device))

    def of_expert(self, kind: str, number: int, inputs: Tensor) -> Tensor:
        """Return the [tokens, outputs] update of the output of one of this rank's experts, from the expert's inputs."""
        a, b = self._factors(kind, inputs.dtype)
        return F.linear(F.linear(inputs, a[number]), b[number]) * self._scaling

    def of_all(self, kind: str, inputs: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Return the [tokens, outputs] update of the outputs of all of this rank's experts, from inputs sorted by expert."""
        ends = torch.tensor(tokens_per_expert, device=inputs.device).cumsum(0).to(torch.int32)
        return low_rank_products(inputs, *self._factors(kind, inputs.dtype), ends) * self._scaling

    def updates(self) -> Iterator[tuple[str, "Update"]]:
        """Yield the canonical names and updates of the matrices of this rank's experts."""
        is_first_copy = rank_groups().expert_copies.rank() == 0
        for kind, matrix in self._matrices.items():
            first = first_local_expert(matrix.num_experts)
            for number, (a, b) in enumerate(zip(*(self._stacked(kind, factor).detach() for factor in "AB"), strict=True)):
                update = Update(partial(self._difference, a, b), len(b) * a.shape[1], is_first_copy)
                yield with_expert(matrix.weight.megatron, first + number), update

    def _difference(self, a: Tensor, b: Tensor) -> Tensor:
        return (b @ a) * self._scaling

    def _factors(self, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [experts, rank, inputs] and B [experts, outputs, rank] of this rank's experts."""
        whole = "A" if self._matrices[kind].weight.axis == 0 else "B"
        a, b = (self._stacked(kind, factor, is_whole=factor == whole).to(dtype) for factor in "AB")
        return a, b

    def _stacked(self, kind: str, factor: str, *, is_whole: bool = False) -> Tensor:
        parameter = self.get_parameter(f"{kind}_{factor}")
        if is_whole and self._group.size() > 1:  # each rank computes a part of its gradient
            parameter = tensor_parallel.copy_to_tensor_model_parallel_region(parameter, group=self._group)
        return parameter.unflatten(0, (self.num_local, -1))


@dataclass(slots=True, frozen=True)
class Update:
    """Update of this rank's part of one matrix, for merging it into the weight."""

    difference: Callable[[], Tensor]
    """Function that computes scaling B A, [local outputs, local inputs] float32."""
    num_elements: int
    """Number of elements of this rank's parts of the adapted matrices, without other matrices joined in the layer."""
    is_first_copy: bool
    """True on exactly one of the ranks that hold the same part."""


def add_experts_adapters(chunks: Sequence[nn.Module], names: AdapterNames) -> None:
    """Add adapters to this rank's experts in place. All factors are zero."""
    for name, experts in list(expert_layers(chunks)):
        if matrices := names.by_experts.get(name):
            device = next(experts.parameters()).device
            adapt_experts(experts, ExpertsAdapter(experts.num_local_experts, matrices, names, device), matrices)


def adapt_experts(experts: Any, adapter: ExpertsAdapter, matrices: Sequence[AdaptedExperts]) -> None:
    """Add an adapter to a layer of experts: Megatron's `SequentialMLP`, or a layer whose linear layers hold the matrices of all experts."""
    experts.add_module(ADAPTER_MODULE, adapter)
    for matrix in matrices:
        if isinstance(experts, SequentialMLP):
            for number, expert in enumerate(experts.local_experts):
                add_to_output(expert.get_submodule(matrix.linear), adapter, partial(adapter.of_expert, matrix.kind, number))
        else:
            add_to_output(experts.get_submodule(matrix.linear), adapter, partial(adapter.of_all, matrix.kind))


def add_to_output(linear: nn.Module, adapter: Any, update_of: Callable[..., Tensor]) -> None:
    """Add `update_of(*inputs)` to the output of one of Megatron's linear layers while the adapter is on."""

    def add(linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        product, bias = output
        return (product + update_of(*inputs), bias) if adapter.is_on else output

    linear.register_forward_hook(add, prepend=True)  # first, because other hooks change the gradient of the layer's whole output


def _parameter(factor: ExpertsFactor, num_local: int, index: int, count: int, device: torch.device) -> nn.Parameter:
    """Return a zero parameter for the factor's part on the `index`-th of the `count` ranks that share each expert."""
    shape = [factor.shape[0] // factor.num_experts * num_local, factor.shape[1]]
    if factor.axis is not None:
        shape[factor.axis] //= count
    parameter: Any = nn.Parameter(torch.zeros(shape, device=device))  # float32, as in PEFT
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, factor.axis or 0, 1)
    parameter.allreduce = False  # its gradient is summed over the ranks with copies of these experts
    parameter.shared = factor.axis is None and index > 0  # counted only once in the gradient norm
    return parameter
