"""Causal attention over packed sequences (no padding, no attention across sequences)."""

import functools
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fuligo.models.registry import FAMILIES
from fuligo.models.sink_attention import TORCH_ASKS_FOR_GQA, VarlenKernel, batched_with_sinks, flash_with_sinks

PACKABLE = {"full_attention", "sliding_attention"}
"""Values of `layer_types` in transformers' configs whose attention this module computes."""
GATED_DELTA = "linear_attention"
LARGEST_FLASH_HEAD = 256
"""Largest head size that torch 2.13's flash kernel supports; Gemma 4 has heads of 512."""


def unpackable_layers(config: Any) -> list[str]:
    """Return the sorted `layer_types` of a transformers config that neither this module nor `gated_delta` can compute."""
    # Other families (OLMo Hybrid) also have layers of type linear_attention, but with convolutions that `gated_delta` does not replace.
    family = FAMILIES.get(config.model_type)
    packable = PACKABLE | ({GATED_DELTA} if family is not None and family.has_gated_delta else set())
    return sorted(set(getattr(config, "layer_types", None) or ()) - packable)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal softmax attention within each sequence, with grouped query heads (query head h reads key head h * Hkv // H).

    On CUDA in half precision one varlen flash kernel handles all sequences, unless heads are too large for it. Elsewhere neighboring
    sequences of equal length share one batched SDPA call on views, so sorting by length gives few calls and no padding.

    Args:
        query: [T, H, D]
        key: [T, Hkv, D], with H a multiple of Hkv.
        value: [T, Hkv, Dv]
        cu_seqlens: [S + 1] starts of the sequences, ascending from 0 to T.
        scale: factor of the scores, usually D ** -0.5.
        window: number of tokens that a token attends to, itself included; None: all tokens up to it.
        sinks: [H] logit of each head in the denominator of its softmax; None: no sinks.

    Returns:
        [T, H, Dv]
    """
    if fits_flash_kernel(query, value):
        row = varlen_row(tuple(cu_seqlens), query.device)
        return varlen_attention(query, key, value, row, scale=scale, window=window, sinks=sinks)
    runs = equal_length_runs(tuple(cu_seqlens))
    sizes = [count * length for count, length in runs]
    chunks = zip(runs, query.split(sizes), key.split(sizes), value.split(sizes))
    outputs = [_batched(q, k, v, shape, scale=scale, window=window, sinks=sinks) for shape, q, k, v in chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def fits_flash_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's varlen flash kernel supports a query [T, H, D] and a value [T, Hkv, Dv] of these data types and head sizes."""
    is_half_on_cuda = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return is_half_on_cuda and query.size(-1) == value.size(-1) <= LARGEST_FLASH_HEAD


@functools.lru_cache(maxsize=64)
def equal_length_runs(cu_seqlens: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (number of sequences, length) of every run of neighbors with equal lengths, without empty sequences."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    return [(len(list(run)), length) for length, run in groupby(lengths) if length > 0]


def _batched(
    query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, int], *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attend within sequences of equal length; `shape` is (number of sequences, length)."""
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
    band = None if window is None or window >= shape[1] else _band(shape[1], window, query.device)
    if sinks is not None:
        return batched_with_sinks(q, k, v, sinks, scale=scale, visible=band).transpose(1, 2).flatten(0, 1)
    return masked_attention(q, k, v, band, scale=scale).transpose(1, 2).flatten(0, 1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """Attend from [B, H, L, D] to [B, Hkv, K, D] with torch's kernel. `mask`: [L, K], True for keys to attend to; None: causal."""
    gqa = query.size(1) != key.size(1)
    if gqa and query.is_cuda:  # the float32 kernels have no grouped heads; without this SDPA would materialize all scores
        repeats = query.size(1) // key.size(1)
        key, value, gqa = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1), False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)


@functools.lru_cache(maxsize=8)
def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return the [length, length] mask, True where the row's token attends to the column's."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window)


class VarlenRow(NamedTuple):
    """Sequences of a packed row, as tensors for the varlen kernel.

    The longest length is the size of a tensor, since `torch.compile` can trace a size as a variable but specializes on an int.
    """

    starts: Tensor
    """[S + 1] int32 start of each sequence."""
    longest: Tensor
    """[L] with unused values, where L is the length of the longest sequence."""


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, row: VarlenRow, *, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute `packed_attention` with torch's varlen kernel, on CUDA in half precision; `torch.compile` can trace it."""
    longest = row.longest.size(0)
    if sinks is not None:
        return flash_with_sinks(VarlenKernel(row.starts, row.starts, longest, longest, scale, window), query, key, value, sinks)
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if query.size(1) != key.size(1) and TORCH_ASKS_FOR_GQA:
        options["enable_gqa"] = True
    return varlen_attn(query, key, value, row.starts, row.starts, longest, longest, **options)  # pyrefly: ignore[bad-return]  # no aux asked for


@functools.lru_cache(maxsize=64)
def varlen_row(cu_seqlens: tuple[int, ...], device: torch.device) -> VarlenRow:
    """Return the packed row on the device; cached for all layers of a pass."""
    with torch.inference_mode(False):  # the cache also serves passes with gradient
        starts = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
        return VarlenRow(starts, size_tensor(max(end - start for start, end in pairwise(cu_seqlens)), device))


def size_tensor(size: int, device: torch.device) -> Tensor:
    """Return an uninitialized uint8 tensor [size]; only its size is read."""
    return torch.empty(size, dtype=torch.uint8, device=device)
