"""Attention sinks with the flash kernel of CUDA against the same in float64 on the CPU."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from fuligo.models.attention import packed_attention

STARTS = [0, *accumulate([130, 7, 300, 64])]
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64


def inputs(dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return queries, keys, values and sinks whose values bfloat16 holds."""
    gen = torch.Generator().manual_seed(0)
    shapes = [(STARTS[-1], heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)] + [(HEADS,)]
    drawn = [torch.randn(shape, generator=gen).bfloat16() for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def results(dtype: torch.dtype, device: str, window: int | None) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    query, key, value, sinks = given = inputs(dtype, device)
    out = packed_attention(query, key, value, STARTS, scale=HEAD_DIM**-0.5, window=window, sinks=sinks)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device, dtype)
    return [out.detach(), *torch.autograd.grad(out, given, upstream)]


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float32, 1e-4)])
def test_outputs_and_gradients_are_exact(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    for got, want in zip(results(dtype, "cuda", window), results(torch.float64, "cpu", window), strict=True):
        assert (got.cpu().double() - want).abs().max() <= tolerance * want.abs().max()
