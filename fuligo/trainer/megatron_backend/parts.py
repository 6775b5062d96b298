"""Parts of the weights and the optimizer's state on this rank: the units that checkpoints write and read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn

from fuligo.errors import CheckpointError
from fuligo.formats.shards import Shard
from fuligo.models.adapter_names import ExpertsFactor
from fuligo.models.names import EMBEDDING, Form, ModelNames, Weight
from fuligo.trainer.megatron_backend.weights.local import first_local_expert, rank_groups, tensors_of

STATES = ("param", "exp_avg", "exp_avg_sq")
"""Tensors stored in float32 for every trained weight; `param` is the weight itself."""


@dataclass(slots=True, frozen=True)
class LocalPart:
    """Rectangular part of a weight, and its position in the rank's tensor."""

    shard: Shard
    """Shard whose data is a view of the model's memory."""
    start: int
    """Offset of the part in the rank's flattened tensor, in elements."""


@dataclass(slots=True, frozen=True)
class LocalWeight:
    """Tensor of a weight on this rank."""

    name: str
    """Name in `tensors_of`; differs from the weight's name if embedding and output layer are tied."""
    weight: Weight
    tensor: Tensor
    parts: tuple[LocalPart, ...]
    is_first_copy: bool
    """True on exactly one of the ranks that hold this part and have the same rank in `data_parallel`."""
    data_parallel: tuple[int, int]
    """Rank and size of the group of data- and context-parallel ranks that hold equal copies (for experts: `RankGroups.expert_copies`)."""

    def range_shards(self, name: str, flat: Tensor, start: int, end: int) -> Iterator[Shard]:
        """Yield shards of the tensor `name`, which has the weight's shape, for elements [start, end) of this rank's flattened part.

        Args:
            flat: [end - start] values of these elements.
        """
        for part in self.parts:
            first, last = max(start, part.start), min(end, part.start + part.shard.data.numel())
            if first < last:
                yield from part.shard.flat_range(name, flat[first - start : last - start], first - part.start, last - part.start)


def local_parts(weight: Weight, tensor: Tensor, index: int, count: int) -> tuple[LocalPart, ...]:
    """Split a rank's tensor into rectangular parts of the weight.

    Args:
        tensor: the rank's share of the weight, or the whole weight.
        index: index of the rank among the `count` ranks that share the weight.

    Raises:
        CheckpointError: the tensor's shape does not fit the weight.
    """
    rows = tensor.shape[0]
    if weight.is_vocabulary:  # padded to a multiple of the TP size; padding is not stored
        start, stop = (min((index + last) * rows, weight.shape[0]) for last in (0, 1))
        return _row_blocks(weight, tensor, [(start, stop - start)])
    if tensor.shape == weight.shape:
        return _row_blocks(weight, tensor, [(0, rows)])
    axis = weight.axis or 0
    if tensor.shape[axis] * count != weight.shape[axis]:
        raise CheckpointError(
            f"cannot split {weight.megatron} over {count} ranks: its shape {list(weight.shape)} is not {count} times {list(tensor.shape)} "
            "along the split axis; check that MODEL_ARGS and config.json agree"
        )
    if weight.form is Form.GATE_UP:
        half = rows // 2
        return _row_blocks(weight, tensor, [(index * half, half), (weight.shape[0] // 2 + index * half, half)])
    if axis == 0:
        return _row_blocks(weight, tensor, [(index * rows, rows)])
    return (LocalPart(Shard(weight.megatron, weight.shape, (0, index * tensor.shape[1]), tensor), 0),)


def local_experts_parts(factor: ExpertsFactor, tensor: Tensor, first_expert: int, index: int, count: int) -> tuple[LocalPart, ...]:
    """Split a rank's share of the experts' A or B into rectangular parts of `factor`, which covers all experts of the layer.

    Args:
        tensor: the rank's rows of A or B, expert after expert.
        first_expert: index of the rank's first expert.
        index: index of the rank among the `count` ranks that share each expert.
    """
    rows = factor.shape[0] // factor.num_experts
    first, num_local = first_expert * rows, len(tensor) * (count if factor.axis == 0 else 1) // rows
    if factor.axis == 1:
        return (LocalPart(Shard(factor.megatron, factor.shape, (first, index * tensor.shape[1]), tensor), 0),)
    if factor.axis is None:
        return _row_blocks(factor, tensor, [(first, len(tensor))])
    num_blocks = 2 if factor.form is Form.GATE_UP else 1  # blocks per expert: parts of the gate and of the up projection
    whole, share = rows // num_blocks, rows // num_blocks // count
    starts = (first + block * whole + index * share for block in range(num_local * num_blocks))
    return _row_blocks(factor, tensor, [(start, share) for start in starts])


def held_weights(chunks: Sequence[nn.Module], names: ModelNames) -> list[LocalWeight]:
    """Return all weights (or all tensors of the adapter) of this rank, in the same order on ranks that hold the same weights.

    Raises CheckpointError if the model has a weight that `names` does not contain.
    """
    found: list[LocalWeight] = []
    for name, tensor in tensors_of(chunks, names).items():
        weight = names.by_megatron_name.get(name)
        if weight is None:
            raise CheckpointError(
                f"cannot save or load the model's weight {name}: models of type {names.architecture.model_type} have no such weight; check "
                "MODEL_ARGS and --custom-model-provider-path"
            )
        if weight.is_float32 and tensor.dtype != torch.float32:
            tensor.data = tensor.data.float()  # Float16Module has cast it, and Megatron restores float32 only in the next forward pass
        index, count, data_parallel = _place(weight)
        if isinstance(weight, ExpertsFactor):
            first = first_local_expert(weight.num_experts)
            parts, is_split = local_experts_parts(weight, tensor, first, index, count), weight.axis is not None
        else:
            parts, is_split = local_parts(weight, tensor, index, count), weight.is_vocabulary or tensor.shape != weight.shape
        is_first_copy = (is_split or index == 0) and (
            weight.megatron != EMBEDDING or rank_groups().pipeline.rank() == 0  # the last stage may hold a copy
        )
        found.append(LocalWeight(name, weight, tensor, parts, is_first_copy, data_parallel))
    return found


@dataclass(slots=True, frozen=True)
class ParameterState:
    """Optimizer state of a weight, and the range of the weight that it covers."""

    optimizer: MegatronOptimizer
    parameter: nn.Parameter
    start: int
    """Index of the first element of the flattened parameter that the state covers."""
    end: int
    """End of the indices of the covered elements, exclusive."""

    @property
    def is_spread(self) -> bool:
        """True if data-parallel ranks keep different ranges of the state, not copies."""
        return isinstance(self.optimizer, DistributedOptimizer)

    def tensors(self) -> dict[str, Tensor]:
        """Return the [end - start] float32 tensors of `STATES`: the optimizer's memory, or copies with the distributed optimizer."""
        held = self._held()
        return {name: held[name].detach().view(-1) for name in STATES}

    @torch.no_grad()
    def overwrite(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the state with the (modified) tensors that `tensors()` returned."""
        if isinstance(self.optimizer, DistributedOptimizer):  # otherwise the tensors are the optimizer's memory
            self.optimizer._set_main_param_and_optimizer_states(self.parameter, {**self._held(), **tensors})

    def _held(self) -> dict[str, Tensor]:
        if isinstance(self.optimizer, DistributedOptimizer):
            return self.optimizer._get_main_param_and_optimizer_states(self.parameter)
        main = getattr(self.parameter, "main_param", self.parameter)  # float32 copy if the parameter is in half precision
        return {"param": main, **self.optimizer.optimizer.state[main]}


def parameter_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """Yield the states of all trained parameters of which this rank keeps a part."""
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_gbuf_map:
                held = part._get_model_param_range_map(parameter)["param"]
                yield ParameterState(part, parameter, held.start, held.end)
        else:
            parameters: Any = part.get_parameters()
            if isinstance(part, Float16OptimizerWithFloat16Params):
                parameters = [parameter for group in (*part.float16_groups, *part.fp32_from_fp32_groups) for parameter in group]
            yield from (ParameterState(part, parameter, 0, parameter.numel()) for parameter in parameters)


def set_step(optimizer: MegatronOptimizer, num_steps: int) -> None:
    """Allocate the optimizer's state and set its step counters to `num_steps`; clear the state if that is 0."""
    for part in _parts(optimizer):
        if num_steps == 0:
            part.optimizer.state.clear()
        elif isinstance(part, DistributedOptimizer):
            groups = [{key: value for key, value in group.items() if key != "params"} for group in part.optimizer.param_groups]
            part.load_state_dict({"optimizer": {"param_groups": [{**group, "step": num_steps} for group in groups]}})
            # Megatron lets all parameters share one step tensor, which torch's Adam would increment once per parameter.
            for state in part.optimizer.state.values():
                if torch.is_tensor(state.get("step")):
                    state["step"] = state["step"].clone()
        else:
            _set_step(part.optimizer, num_steps)


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Allocate moments that do not exist yet; Adam would do so in its first step.

    If a part of the optimizer is on the CPU, only the moments on the GPU are allocated.
    """
    for part in _parts(optimizer):
        adam: Any = part.optimizer.gpu_optimizer if isinstance(part.optimizer, HybridDeviceOptimizer) else part.optimizer
        if adam is None or adam.state:
            continue
        if isinstance(adam, torch.optim.Adam):
            _set_step(adam, 0)
        else:  # TransformerEngine's FusedAdam
            for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
                adam.initialize_state(parameter, adam.store_param_remainders and parameter.dtype == torch.bfloat16)


def _set_step(adam: torch.optim.Optimizer, num_steps: int) -> None:
    """Set the step counters, which torch's Adam keeps per parameter and TransformerEngine's per group, and allocate the moments."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            for name in STATES[1:]:
                state.setdefault(name, torch.zeros_like(parameter))
            if isinstance(adam, torch.optim.Adam):
                state["step"] = torch.tensor(float(num_steps))
        if not isinstance(adam, torch.optim.Adam):
            group["step"] = num_steps


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the chained optimizers: Megatron uses one for experts and one for all other weights."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _row_blocks(weight: Weight, tensor: Tensor, blocks: Sequence[tuple[int, int]]) -> tuple[LocalPart, ...]:
    """Split the tensor's rows into consecutive `blocks` of (first row in the weight, number of rows)."""
    parts: list[LocalPart] = []
    row, columns = 0, tensor[0].numel()
    for first, num_rows in blocks:
        if num_rows:
            offset = (first, *(0 for _ in weight.shape[1:]))
            parts.append(LocalPart(Shard(weight.megatron, weight.shape, offset, tensor[row : row + num_rows]), row * columns))
        row += num_rows
    return tuple(parts)


def _place(weight: Weight) -> tuple[int, int, tuple[int, int]]:
    """Return rank and size of the group that may split the weight, and (rank, size) of the group with equal copies of it."""
    groups = rank_groups()
    sharing, copies = groups.tensor, groups.copies
    if weight.expert is not None or isinstance(weight, ExpertsFactor):
        sharing, copies = groups.expert_tensor, groups.expert_copies
    return sharing.rank(), sharing.size(), (copies.rank(), copies.size())
