"""Frozen linear layers whose matrices are held in 4 or 8 bits (QLoRA, arXiv 2305.14314), quantized by bitsandbytes.

bitsandbytes itself is imported where it is used; a model without such layers does not need it.
"""

import logging
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import is_adapter_name, stored_name
from fuligo.formats.quantised_base import BLOCK_SIZE, BasePrecision, QuantisedBase
from fuligo.models.adapter import linear_layers


class QuantisedLinear(nn.Module):
    """Linear layer without gradients of its own parameters.

    A pass dequantizes the matrix, rounds it to `base.dtype`, and multiplies by it in the data type of the input; the backward pass does so
    again instead of keeping it. Buffers are in no state dict, and FSDP does not shard them.

    Args:
        linear: the layer to replace; its bias is taken over.
    """

    def __init__(self, linear: nn.Linear, base: QuantisedBase) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.base, self.bias = base, linear.bias
        packed, scales = quantised(linear.weight.detach(), base)
        self.packed: Tensor
        self.scales: Tensor
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The matrix [outputs, inputs], dequantized into new memory."""
        return dequantised(self.packed, self.scales, [self.out_features, self.in_features], self.base)

    @property
    def num_elements(self) -> int:
        return self.in_features * self.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        shape, base = [self.out_features, self.in_features], self.base
        return torch.ops.fuligo.quantised_product(inputs, self.packed, self.scales, self.bias, shape, base.precision, base.dtype)


def quantise_base(model: PreTrainedModel, base: QuantisedBase, device: torch.device) -> None:
    """Replace the linear layers below the adapter, except the output layer, by quantized ones, in place.

    Args:
        device: quantizes and then holds the matrices.

    Raises:
        ConfigError: the model has experts, whose matrices are no linear layers.
    """
    for name in _base_layers(model):
        parent, _, attribute = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        linear.weight.data = linear.weight.data.to(device)
        setattr(model.get_submodule(parent), attribute, QuantisedLinear(linear, base))


@torch.no_grad()
def round_base(model: PreTrainedModel, base: QuantisedBase) -> None:
    """Give the linear layers of a model, with or without an adapter, the values that they would have quantized, in place.

    Raises:
        ConfigError: as `quantise_base`.
    """
    for name in _base_layers(model):
        weight = model.get_submodule(name).get_parameter("weight")
        weight.copy_(rounded(weight, base))


def rounded(weight: Tensor, base: QuantisedBase) -> Tensor:
    """Return a matrix quantized and dequantized, in its own data type."""
    return dequantised(*quantised(weight, base), list(weight.shape), base).to(weight.dtype)


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantized layers by the names that their weights have in a model without adapter."""
    return {stored_name(f"{name}.weight"): module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def quantisable_weights(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights that `quantise_base` replaces, as they are in a model without adapter.

    Raises:
        ConfigError: as `quantise_base`.
    """
    return [stored_name(f"{name}.weight") for name in _base_layers(model)]


def _base_layers(model: PreTrainedModel) -> list[str]:
    experts = [name for name, module in model.named_modules() if name.endswith(".experts") and hasattr(module, "gate_up_proj")]
    if experts:
        raise ConfigError(
            f"--lora-base-precision: the experts of {type(model).__name__} are stacked matrices, which are not quantized; train it with "
            "--lora-base-precision full"
        )
    return [name for name in linear_layers(model) if not is_adapter_name(stored_name(f"{name}.weight"))]


@torch.no_grad()
def quantised(weight: Tensor, base: QuantisedBase) -> tuple[Tensor, Tensor]:
    """Return the packed bytes of a matrix and the float32 scales of its blocks of `BLOCK_SIZE` elements."""
    functional, weight = _bitsandbytes(), weight.to(_dtype(base)).contiguous()
    if base.precision == "nf4":
        packed, state = functional.quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4")
    else:
        packed, state = functional.quantize_blockwise(weight, code=_dynamic_map(weight.device), blocksize=BLOCK_SIZE)
    return packed, state.absmax


@torch.no_grad()
def dequantised(packed: Tensor, scales: Tensor, shape: list[int], base: QuantisedBase) -> Tensor:
    """Return the matrix of this shape, [outputs, inputs]."""
    functional, dtype = _bitsandbytes(), _dtype(base)
    if base.precision == "nf4":
        state = functional.QuantState(scales, shape=torch.Size(shape), blocksize=BLOCK_SIZE, quant_type="nf4", dtype=dtype)
        return functional.dequantize_4bit(packed, state)
    state = functional.QuantState(scales, code=_dynamic_map(packed.device), blocksize=BLOCK_SIZE, dtype=dtype)
    return functional.dequantize_blockwise(packed, state)


@torch.library.custom_op("fuligo::quantised_product", mutates_args=())
def _product(inputs: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, shape: list[int], precision: str, dtype: str) -> Tensor:
    """Return [..., outputs]. One operation for `torch.compile`, which would otherwise keep the dequantized matrix for the backward pass."""
    weight = dequantised(packed, scales, shape, QuantisedBase(cast(BasePrecision, precision), dtype))
    return F.linear(inputs, weight.to(inputs.dtype), bias)


@torch.library.custom_op("fuligo::quantised_product_gradient", mutates_args=())
def _product_gradient(gradient: Tensor, packed: Tensor, scales: Tensor, shape: list[int], precision: str, dtype: str) -> Tensor:
    """Return [..., inputs] the gradient of the inputs from that of the outputs."""
    weight = dequantised(packed, scales, shape, QuantisedBase(cast(BasePrecision, precision), dtype))
    return gradient @ weight.to(gradient.dtype)


@_product.register_fake
def _(inputs: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, shape: list[int], precision: str, dtype: str) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], shape[0]))


@_product_gradient.register_fake
def _(gradient: Tensor, packed: Tensor, scales: Tensor, shape: list[int], precision: str, dtype: str) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, scales, _, ctx.shape, ctx.precision, ctx.dtype = inputs
    ctx.save_for_backward(packed, scales)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, scales = ctx.saved_tensors
    inputs = torch.ops.fuligo.quantised_product_gradient(gradient, packed, scales, ctx.shape, ctx.precision, ctx.dtype)
    return inputs, None, None, None, None, None, None


_product.register_autograd(_backward, setup_context=_keep)


def _dtype(base: QuantisedBase) -> torch.dtype:
    return getattr(torch, base.dtype)


@cache
def _bitsandbytes() -> Any:
    """Import bitsandbytes; on CPUs it logs that a kernel of another package is missing, which is not needed here."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from bitsandbytes import functional

    return functional


@cache
def _dynamic_map(device: torch.device) -> Tensor:
    """Return [256] the values of a byte."""
    return _bitsandbytes().create_dynamic_map().to(device)
