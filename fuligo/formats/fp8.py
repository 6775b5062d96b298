"""Matrices in FP8 (float8 e4m3), shared by conversion and weight sync: the same weights give the same bytes, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fuligo.errors import WeightSyncError
from fuligo.formats.buckets import NamedTensors
from fuligo.formats.checkpoint_form import checkpoint_weights
from fuligo.formats.quantisation import EngineQuantisation, Quantisation

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448; 3 bits of mantissa, exponents from 2**-6, below that steps of 2**-9."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A smaller one has few digits; what it scales is zero for any model."""


def quantise(weight: Tensor, quantisation: Quantisation) -> tuple[Tensor, Tensor]:
    """FP8 values and float32 scales of a matrix.

    Args:
        weight: [rows, columns], any float type.

    Returns:
        [rows, columns] FP8, and scales of `quantisation.scale_shape`: weight = values * scale, up to half a step of FP8.

    Raises:
        ValueError: a weight is not finite.
    """
    scales = fp8_scales(weight, quantisation)
    return fp8_values(weight, scales, quantisation), scales


def fp8_scales(weight: Tensor, quantisation: Quantisation) -> Tensor:
    """Float32 scales, of `quantisation.scale_shape`, that use FP8's whole range.

    Raises:
        ValueError: a weight is not finite.
    """
    return scales_for(block_maxima(weight, quantisation))


def block_maxima(weight: Tensor, quantisation: Quantisation) -> Tensor:
    """The largest absolute value of each block, in float32, of `quantisation.scale_shape`.

    Raises:
        ValueError: a weight is not finite.
    """
    shape = tuple(weight.shape)
    largest = _in_blocks(weight, *quantisation.block_of(shape)).abs().amax(dim=(1, 3)).float()
    if not bool(largest.isfinite().all()):
        raise ValueError("it has values that are not finite")
    return largest.reshape(quantisation.scale_shape(shape))


def scales_for(maxima: Tensor) -> Tensor:
    """The largest value becomes the largest of FP8; a block of zeros has scale 1."""
    largest = torch.full_like(maxima, LARGEST)  # by a number, CUDA would multiply with its rounded reciprocal
    return torch.where(maxima > 0, (maxima / largest).clamp(min=_SMALLEST_SCALE), 1.0)


def fp8_values(weight: Tensor, scales: Tensor, quantisation: Quantisation) -> Tensor:
    """[rows, columns] FP8: weight / scale, rounded to nearest, ties to even.

    The quotient exceeds 448 by float32's rounding at most, which rounds to 448: nothing has to be clamped.
    """
    return _by_block(torch.div, weight, scales, quantisation).to(FP8)


def dequantise(values: Tensor, scales: Tensor, quantisation: Quantisation) -> Tensor:
    """[rows, columns] float32."""
    return _by_block(torch.mul, values, scales, quantisation)


def quantised_weights(named_weights: NamedTensors, engine: EngineQuantisation) -> Iterator[tuple[str, Tensor]]:
    """The stream that engines on an FP8 checkpoint expect: what the converter would have written, tensor by tensor.

    Args:
        named_weights: Hugging Face names and full tensors; experts one by one, or as transformers keeps them (`experts.gate_up_proj`).

    Raises:
        WeightSyncError: a weight is not finite; names it.
    """
    for name, weight in checkpoint_weights(named_weights):
        if name not in engine.names:
            yield name, weight
            continue
        try:
            values, scales = quantise(weight, engine.quantisation)
        except ValueError as error:
            raise WeightSyncError(f"{name} cannot be quantised for the engines: {error}") from None
        yield name, values
        yield engine.quantisation.scale_name(name), scales


def _in_blocks(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """[blocks down, rows, blocks across, columns]; blocks at the edges are filled with zeros."""
    below, beside = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    padded = F.pad(matrix, (0, beside, 0, below)) if below or beside else matrix
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _by_block(operation: Callable[[Tensor, Tensor], Tensor], matrix: Tensor, scales: Tensor, quantisation: Quantisation) -> Tensor:
    """`operation` of each value and the scale of its block, in float32."""
    height, width = matrix.shape
    rows, columns = quantisation.block_of((height, width))
    blocks = _in_blocks(matrix.float(), rows, columns)
    result = operation(blocks, scales.reshape(blocks.shape[0], 1, blocks.shape[2], 1))
    return result.flatten(2).flatten(0, 1)[:height, :width]
