"""FP8 (float8 e4m3) quantization for conversion and weight sync: equal weights give equal bytes in both, on CPU and GPU."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fuligo.errors import WeightSyncError
from fuligo.formats.buckets import NamedTensors
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.quantization import EngineQuantization, Quantization
from fuligo.formats.stored_experts import StoredExperts

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""Largest FP8 value, 448. FP8 e4m3 has 3 mantissa bits, exponents from 2**-6, and subnormal steps of 2**-9."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Lower bound of scales: smaller ones lose precision, and the values of their blocks are practically 0."""


def quantize(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Return the FP8 values and float32 scales of a matrix [rows, columns] of any float type.

    The values are [rows, columns], the scales of `quantization.scale_shape`: weight = values * scale, up to half an FP8 step. Raises
    ValueError if a weight is not finite.
    """
    scales = fp8_scales(weight, quantization)
    return fp8_values(weight, scales, quantization), scales


def fp8_scales(weight: Tensor, quantization: Quantization) -> Tensor:
    """Return float32 scales of `quantization.scale_shape` that use the full FP8 range. Raises ValueError if a weight is not finite."""
    return scales_for(block_maxima(weight, quantization))


def block_maxima(weight: Tensor, quantization: Quantization) -> Tensor:
    """Return each block's largest absolute value, float32 of `quantization.scale_shape`. Raises ValueError if a weight is not finite."""
    shape = tuple(weight.shape)
    largest = _in_blocks(weight, *quantization.block_of(shape)).abs().amax(dim=(1, 3)).float()
    if not bool(largest.isfinite().all()):
        raise ValueError("it contains NaN or infinity")
    return largest.reshape(quantization.scale_shape(shape))


def scales_for(maxima: Tensor) -> Tensor:
    """Return scales that map each block's maximum to the FP8 maximum; a block of zeros has scale 1."""
    largest = torch.full_like(maxima, LARGEST)  # CUDA divides by a scalar as a product with its rounded reciprocal.
    return torch.where(maxima > 0, (maxima / largest).clamp(min=_SMALLEST_SCALE), 1.0)


def fp8_values(weight: Tensor, scales: Tensor, quantization: Quantization) -> Tensor:
    """Return weight / scale as [rows, columns] FP8, rounded to nearest, ties to even.

    Float32 rounding can push the quotient slightly above 448, which rounds back to 448; no clamp is needed.
    """
    height, width = weight.shape
    blocks = _in_blocks(weight.float(), *quantization.block_of((height, width)))
    quotients = blocks / scales.reshape(blocks.shape[0], 1, blocks.shape[2], 1)
    return quotients.flatten(2).flatten(0, 1)[:height, :width].to(FP8)


def quantized_weights(
    named_weights: NamedTensors, engine: EngineQuantization, experts: StoredExperts = StoredExperts.APART
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that engines started from an FP8 checkpoint expect, equal to what `fuligo convert fp8` would write.

    Args:
        named_weights: Hugging Face names and full tensors; experts one by one or fused as in transformers (`experts.gate_up_proj`).
        experts: form of routed experts in the engines.

    Raises:
        WeightSyncError: a weight to quantize is not finite.
    """
    for name, weight in checkpoint_weights(named_weights, experts):
        if name not in engine.names:
            yield name, weight
            continue
        try:
            values, scales = quantize(weight, engine.quantization)
        except ValueError as error:
            raise WeightSyncError(
                f"cannot quantize {name} for the engines: {error}; resume from the last checkpoint with a smaller --lr"
            ) from None
        yield name, values
        yield engine.quantization.scale_name(name), scales


def _in_blocks(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return [blocks down, rows, blocks across, columns]; blocks at the edges are padded with zeros."""
    below, beside = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    padded = F.pad(matrix, (0, beside, 0, below)) if below or beside else matrix
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
