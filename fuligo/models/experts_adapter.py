"""LoRA of MoE experts, as PEFT's `target_parameters` define it: every expert's matrix has its own A and B.

PEFT's own layers add B A to the stacked weights before every pass: in bf16 that rounds small updates away, and it needs memory for all
experts. Here the tokens of an expert pass through its A and B in addition to its matrices.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel

from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig

ADAPTED_EXPERTS = "fuligo_adapted"
"""Name under which models select this implementation of experts: `set_experts_implementation(ADAPTED_EXPERTS)`."""
EXPERT_MATRICES = ("gate_up_proj", "down_proj")
"""Matrices of all experts of a layer, as transformers stacks them."""
ALIGNMENT = 8
"""Multiple to which the rank is padded, as grouped matrix products on GPUs require in bf16."""


class ExpertsAdapter(nn.Module):
    """Low-rank updates of all experts of a layer, in the layout of PEFT's files.

    Args:
        experts: the adapted module of transformers, with `gate_up_proj` [E, 2 * I, H] and `down_proj` [E, H, I].
    """

    def __init__(self, experts: nn.Module, config: AdapterConfig) -> None:
        super().__init__()
        self.rank, self.scaling, self.is_on = config.rank, config.scaling, True
        for matrix in ("gate_up", "down"):
            weight = experts.get_parameter(f"{matrix}_proj")
            self.num_experts, outputs, inputs = weight.shape
            a = torch.empty(self.num_experts * config.rank, inputs, device=weight.device)
            self.register_parameter(f"{matrix}_A", nn.Parameter(a.uniform_(-(inputs**-0.5), inputs**-0.5)))  # as in PEFT
            self.register_parameter(f"{matrix}_B", nn.Parameter(torch.zeros(outputs, config.rank * self.num_experts, device=weight.device)))

    def factors(self, matrix: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [E, R, inputs] and B [E, outputs, R] of the matrix `gate_up` or `down`, cast to `dtype`."""
        a, b = (self.get_parameter(f"{matrix}_{factor}").to(dtype) for factor in "AB")
        return stacked_factors(a, b, self.num_experts)


def stacked_factors(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return A [E, R, inputs] and B [E, outputs, R] as views of a PEFT file's A [E * R, inputs] and B [outputs, R * E]."""
    return a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def low_rank_products(rows: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows [S, inputs] of each expert by its A and B; return [S, outputs].

    Args:
        rows: [S, inputs], sorted by expert.
        a: [E, R, inputs].
        b: [E, outputs, R].
        ends: [E] int32, the end of each expert's rows.
    """
    padding = -a.shape[1] % ALIGNMENT
    a, b = (F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))) if padding else (a, b.contiguous())
    return F.grouped_mm(F.grouped_mm(rows, a.transpose(1, 2), offs=ends), b.transpose(1, 2), offs=ends)


def adapted_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted outputs [T, H] of a layer's experts for tokens [T, H] and their chosen experts [T, K]; called by transformers."""
    (num_tokens, top_k), adapter = top_k_index.shape, getattr(experts, "adapter", None)
    chosen, order = top_k_index.flatten().sort(stable=True)
    ends = torch.bincount(chosen, minlength=experts.num_experts).cumsum(0).to(torch.int32)
    gate_up = _product(hidden[order // top_k], experts.gate_up_proj, ends, adapter, "gate_up")
    outputs = _product(experts._apply_gate(gate_up), experts.down_proj, ends, adapter, "down")
    weighted = outputs * top_k_weights.flatten()[order, None]
    in_order = torch.empty_like(order)
    in_order[order] = torch.arange(len(order), device=order.device)
    return weighted[in_order].unflatten(0, (num_tokens, top_k)).sum(1).to(hidden.dtype)


class StoredMatrices(Protocol):
    """Matrices of all experts of a layer that are not held as a tensor, such as `quantized_linear.QuantizedWeight`."""

    def product(self, rows: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Multiply rows [S, inputs], sorted by expert, by their expert's matrix; `ends` [E] int32 is the end of each expert's rows."""
        ...


def _product(rows: Tensor, weight: Tensor | StoredMatrices, ends: Tensor, adapter: ExpertsAdapter | None, matrix: str) -> Tensor:
    """Multiply rows [S, inputs], sorted by expert, by matrices [E, outputs, inputs], and add the adapter's update if it is on."""
    if isinstance(weight, Tensor):
        rows = rows.to(weight.dtype)
        product = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    else:
        product = weight.product(rows, ends=ends)
    if adapter is None or not adapter.is_on:
        return product
    return product + low_rank_products(rows, *adapter.factors(matrix, rows.dtype), ends) * adapter.scaling


def add_experts_adapter(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Adapt all experts of the model, in place; B starts as zeros. Raises ConfigError if the model has none that can be adapted."""
    found = list(stacked_experts(model).values())
    if not found:
        raise ConfigError(f"{type(model).__name__} has no experts to adapt; remove --lora-experts")
    if not all(map(has_plain_matrices, found)):
        raise ConfigError(
            f"cannot adapt the experts of {type(model).__name__}: they have transposed matrices and biases; remove --lora-experts"
        )
    for experts in found:
        experts.add_module("adapter", ExpertsAdapter(experts, config))
    use_own_experts(model)


def use_own_experts(model: PreTrainedModel) -> None:
    """Make the model compute its experts with `adapted_experts`."""
    ALL_EXPERTS_FUNCTIONS.register(ADAPTED_EXPERTS, adapted_experts)
    model.set_experts_implementation(ADAPTED_EXPERTS)


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold all experts of a layer as stacked matrices, by module name."""
    return {name: module for name, module in model.named_modules() if name.endswith(".experts") and hasattr(module, "gate_up_proj")}


def has_plain_matrices(experts: nn.Module) -> bool:
    """Return whether the matrices are [E, outputs, inputs] without biases."""
    return not (getattr(experts, "is_transposed", False) or getattr(experts, "has_bias", False))


def experts_adapters(model: nn.Module) -> Iterator[tuple[str, ExpertsAdapter]]:
    for name, module in model.named_modules():
        if isinstance(module, ExpertsAdapter):
            yield name.removesuffix(".adapter"), module
