"""Frozen linear layers and experts whose matrices are held in 4 or 8 bits (QLoRA, arXiv 2305.14314), quantized by bitsandbytes.

bitsandbytes is imported only on use, so a model without such layers does not need it.
"""

import logging
import math
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from transformers.modeling_utils import PreTrainedModel

from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import is_adapter_name, stored_name
from fuligo.formats.quantized_base import BLOCK_SIZE, BasePrecision, QuantizedBase
from fuligo.models.adapter import linear_layers
from fuligo.models.experts_adapter import EXPERT_MATRICES, has_plain_matrices, stacked_experts, use_own_experts

LARGEST = 2**31 - 1
"""Largest number of elements that bitsandbytes' kernels can index."""


class QuantizedWeight(nn.Module):
    """Frozen matrix, or the matrices of all experts of a layer, in 4 or 8 bits.

    The forward pass dequantizes the matrix, rounds it to `base.dtype`, and multiplies by it in the dtype of the input. The backward pass
    dequantizes it again instead of keeping it. The buffers are not in the state dict, and FSDP does not shard them.
    """

    def __init__(self, weight: Tensor, base: QuantizedBase) -> None:
        super().__init__()
        self.shape, self.base = list(weight.shape), base
        packed, scales = quantized(weight.detach(), base)
        self.packed: Tensor
        self.scales: Tensor
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        """Dequantized values [outputs, inputs], or [E, outputs, inputs], in new memory."""
        return dequantized(self.packed, self.scales, self.shape, self.base)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def product(self, rows: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Multiply rows by the transposed matrix; with `ends`, each row by the transposed matrix of its expert.

        Args:
            rows: [..., inputs], or with `ends` [S, inputs], sorted by expert.
            bias: [outputs]; ignored with `ends`.
            ends: [E] int32, the end of each expert's rows; None: there is only one matrix.

        Returns:
            [..., outputs], or [S, outputs]
        """
        stored = self.shape, self.base.precision, self.base.dtype
        return torch.ops.fuligo.quantized_product(rows, self.packed, self.scales, bias, ends, *stored)


class QuantizedLinear(QuantizedWeight):
    """Frozen linear layer with a quantized weight, which replaces `linear` and keeps its bias."""

    def __init__(self, linear: nn.Linear, base: QuantizedBase) -> None:
        super().__init__(linear.weight, base)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product(inputs, self.bias)


def quantize_base(model: PreTrainedModel, base: QuantizedBase, device: torch.device) -> None:
    """Replace the base model's linear layers, except the output layer, and the experts' matrices by quantized ones, in place.

    `device` quantizes and holds the matrices. Raises ConfigError if the model has experts that cannot be quantized.
    """
    linear, stacked = _base_layers(model), _experts(model)
    for name in linear:
        parent, _, attribute = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.weight.data = layer.weight.data.to(device)
        setattr(model.get_submodule(parent), attribute, QuantizedLinear(layer, base))
    for experts in stacked.values():
        for matrix in EXPERT_MATRICES:
            weight = experts.get_parameter(matrix).data.to(device)
            delattr(experts, matrix)
            experts.add_module(matrix, QuantizedWeight(weight, base))
    if stacked:
        use_own_experts(model)


@torch.no_grad()
def round_base(model: PreTrainedModel, base: QuantizedBase) -> None:
    """Quantize and dequantize the base weights of a model, with or without an adapter, in place."""
    for name in _base_weights(model):
        weight = model.get_parameter(name)
        weight.copy_(rounded(weight, base))


def rounded(weight: Tensor, base: QuantizedBase) -> Tensor:
    """Return a weight quantized and dequantized, in its original dtype."""
    return dequantized(*quantized(weight, base), list(weight.shape), base).to(weight.dtype)


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the quantized weights, by their names in a model without an adapter."""
    found: dict[str, QuantizedWeight] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            found[stored_name(f"{name}.weight") if isinstance(module, QuantizedLinear) else name] = module
    return found


def quantizable_weights(model: PreTrainedModel) -> list[str]:
    """Return the weights that `quantize_base` replaces, by their names in a model without an adapter.

    Raises ConfigError if the model has experts that cannot be quantized.
    """
    return [stored_name(name) for name in _base_weights(model)]


def _base_weights(model: PreTrainedModel) -> list[str]:
    experts = [f"{name}.{matrix}" for name in _experts(model) for matrix in EXPERT_MATRICES]
    return [*(f"{name}.weight" for name in _base_layers(model)), *experts]


def _base_layers(model: PreTrainedModel) -> list[str]:
    return [name for name in linear_layers(model) if not is_adapter_name(stored_name(f"{name}.weight"))]


def _experts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of experts by name. Raises ConfigError if they cannot be quantized."""
    found = stacked_experts(model)
    for name, experts in found.items():
        matrices = [experts.get_parameter(matrix) for matrix in EXPERT_MATRICES]
        widths, largest = [matrix.shape[-1] for matrix in matrices], max(matrix.numel() for matrix in matrices)
        if largest > LARGEST:
            raise ConfigError(
                f"--lora-base-precision cannot quantize {name} of {type(model).__name__}: a matrix has {largest:,} elements, but "
                f"bitsandbytes quantizes at most {LARGEST:,} at a time; use --lora-base-precision full"
            )
        if not has_plain_matrices(experts) or any(width % BLOCK_SIZE for width in widths):
            raise ConfigError(
                f"--lora-base-precision cannot quantize {name} of {type(model).__name__}: it needs matrices that are not transposed, "
                f"without biases, with rows of a multiple of {BLOCK_SIZE} elements (here {' and '.join(map(str, widths))}); use "
                "--lora-base-precision full"
            )
    return found


@torch.no_grad()
def quantized(weight: Tensor, base: QuantizedBase) -> tuple[Tensor, Tensor]:
    """Quantize a weight; return the packed bytes, and the float32 scales of its blocks of `BLOCK_SIZE` elements."""
    functional, weight = _bitsandbytes(), weight.to(_dtype(base)).contiguous()
    if base.precision == "nf4":
        packed, state = functional.quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4")
    else:
        packed, state = functional.quantize_blockwise(weight, code=_dynamic_map(weight.device), blocksize=BLOCK_SIZE)
    return packed, state.absmax


@torch.no_grad()
def dequantized(packed: Tensor, scales: Tensor, shape: list[int], base: QuantizedBase) -> Tensor:
    functional, dtype = _bitsandbytes(), _dtype(base)
    if base.precision == "nf4":
        state = functional.QuantState(scales, shape=torch.Size(shape), blocksize=BLOCK_SIZE, quant_type="nf4", dtype=dtype)
        return functional.dequantize_4bit(packed, state)
    state = functional.QuantState(scales, code=_dynamic_map(packed.device), blocksize=BLOCK_SIZE, dtype=dtype)
    return functional.dequantize_blockwise(packed, state)


@library.custom_op("fuligo::quantized_product", mutates_args=())
def _product(
    rows: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, ends: Tensor | None, shape: list[int], precision: str, dtype: str
) -> Tensor:
    """Return the products [..., outputs]; a custom op, since `torch.compile` would otherwise keep the dequantized matrix for backward."""
    weight = dequantized(packed, scales, shape, QuantizedBase(cast(BasePrecision, precision), dtype)).to(rows.dtype)
    return F.linear(rows, weight, bias) if ends is None else F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


@library.custom_op("fuligo::quantized_product_gradient", mutates_args=())
def _product_gradient(
    gradient: Tensor, packed: Tensor, scales: Tensor, ends: Tensor | None, shape: list[int], precision: str, dtype: str
) -> Tensor:
    """Return the gradient of the rows [..., inputs] from the gradient of the outputs [..., outputs]."""
    weight = dequantized(packed, scales, shape, QuantizedBase(cast(BasePrecision, precision), dtype)).to(gradient.dtype)
    return gradient @ weight if ends is None else F.grouped_mm(gradient.contiguous(), weight, offs=ends)


@_product.register_fake
def _(rows: Tensor, packed: Tensor, scales: Tensor, bias: Any, ends: Any, shape: list[int], precision: str, dtype: str) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], shape[-2]))


@_product_gradient.register_fake
def _(gradient: Tensor, packed: Tensor, scales: Tensor, ends: Any, shape: list[int], precision: str, dtype: str) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], shape[-1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, scales, _, ends, ctx.shape, ctx.precision, ctx.dtype = inputs
    ctx.has_experts = ends is not None
    ctx.save_for_backward(packed, scales, *([ends] if ctx.has_experts else []))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, scales, *more = ctx.saved_tensors
    stored = more[0] if ctx.has_experts else None, ctx.shape, ctx.precision, ctx.dtype
    rows = torch.ops.fuligo.quantized_product_gradient(gradient, packed, scales, *stored)
    return rows, *(None,) * 7


_product.register_autograd(_backward, setup_context=_keep)


def _dtype(base: QuantizedBase) -> torch.dtype:
    return getattr(torch, base.dtype)


@cache
def _bitsandbytes() -> Any:
    """Import bitsandbytes without its log line about a missing CPU kernel, which fuligo does not use."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from bitsandbytes import functional  # an extra

    return functional


@cache
def _dynamic_map(device: torch.device) -> Tensor:
    """Return bitsandbytes' 8-bit code: [256] the value of each byte."""
    return _bitsandbytes().create_dynamic_map().to(device)
