"""Causal attention over packed sequences (no padding, no attention across sequences)."""

import functools
import inspect
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

TORCH_ASKS_FOR_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True after torch 2.11, which computes grouped heads without being asked."""
PACKABLE = {"full_attention", "sliding_attention"}
"""`layer_types` of transformers that this module computes."""
GATED_DELTA = "linear_attention"
GATED_DELTA_TYPES = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Model types whose linear attention `gated_delta` computes; others (OLMo Hybrid) have the same sizes but other convolutions."""


def unpackable_layers(config: Any) -> list[str]:
    """Return the sorted `layer_types` of a transformers config that neither this module nor `gated_delta` can compute."""
    packable = PACKABLE | ({GATED_DELTA} if config.model_type in GATED_DELTA_TYPES else set())
    return sorted(set(getattr(config, "layer_types", None) or ()) - packable)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Sequence[int], *, scale: float, window: int | None = None
) -> Tensor:
    """Compute causal softmax attention within each sequence, with grouped query heads (query head h reads key head h * Hkv // H).

    On CUDA in half precision one varlen flash kernel handles all sequences. Elsewhere neighbouring sequences of equal length share one
    batched SDPA call on views, so sorting by length gives few calls and no padding.

    Args:
        query: [T, H, D]
        key: [T, Hkv, D], with H a multiple of Hkv.
        value: [T, Hkv, Dv]
        cu_seqlens: [S + 1] starts of the sequences, rising from 0 to T.
        scale: factor of the scores, usually D ** -0.5.
        window: tokens that a token attends to, itself included; None: all before it.

    Returns:
        [T, H, Dv]
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) == value.size(-1):
        return varlen_attention(query, key, value, *device_cu_seqlens(tuple(cu_seqlens), query.device), scale=scale, window=window)
    runs = equal_length_runs(tuple(cu_seqlens))
    sizes = [count * length for count, length in runs]
    chunks = zip(runs, query.split(sizes), key.split(sizes), value.split(sizes))
    outputs = [_batched(q, k, v, shape, scale=scale, window=window) for shape, q, k, v in chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@functools.lru_cache(maxsize=64)
def equal_length_runs(cu_seqlens: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (number of sequences, length) of every run of neighbours with equal lengths."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    return [(len(list(run)), length) for length, run in groupby(lengths) if length > 0]


def _batched(query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, int], *, scale: float, window: int | None) -> Tensor:
    """Attend within sequences of equal length; `shape` is (number of sequences, length)."""
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
    gqa = query.size(1) != key.size(1)
    if gqa and query.is_cuda:  # the float32 kernels have no grouped heads; without this SDPA would materialise all scores
        repeats = query.size(1) // key.size(1)
        k, v, gqa = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), False
    if window is not None and window < shape[1]:
        mask = _band(shape[1], window, query.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2).flatten(0, 1)


@functools.lru_cache(maxsize=8)
def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return the [length, length] mask, True where the row's token attends to the column's."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, *, scale: float, window: int | None = None
) -> Tensor:
    """Compute what `packed_attention` does with one kernel of torch, on CUDA in half precision; `torch.compile` can trace it.

    Args:
        cu_seqlens: [S + 1] int32 on the device.
        longest: length of the longest sequence.
    """
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if query.size(1) != key.size(1) and TORCH_ASKS_FOR_GQA:
        options["enable_gqa"] = True
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)  # pyright: ignore[reportReturnType]  # no aux asked for


@functools.lru_cache(maxsize=64)
def device_cu_seqlens(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Return ([S + 1] int32 on the device, longest sequence); cached for all layers of a pass."""
    with torch.inference_mode(False):  # the cache also serves passes with gradient
        starts = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return starts, max(end - start for start, end in pairwise(cu_seqlens))
