"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556) over packed rows: each query attends to the best-scored tokens up to it.

Implemented in plain torch. Queries are processed in chunks, so that memory grows with tokens times chosen tokens, not with tokens squared.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fuligo.trainer.megatron_backend.core_attention import zigzag

_CHUNK_BYTES = 2**28
"""Limit of the temporary tensors for one chunk of queries, in bytes."""


@dataclass(slots=True, frozen=True)
class RowPlaces:
    """Positions of one context-parallel rank's L = T / cp tokens in the row of T tokens, as tensors on the CPU."""

    rows: Tensor
    """[L] int64 index of each token in the row; ascending within a sequence."""
    positions: Tensor
    """[L] int64 position of each token in its sequence."""
    in_order: Tensor
    """[T] int64 indices that put the concatenated tokens of all ranks into the row's order."""
    longest: int
    """Number of tokens of the longest sequence."""

    def slice(self, start: int, stop: int) -> Self:
        """Return the positions of the rank's tokens from `start` to `stop`, exclusive."""
        return replace(self, rows=self.rows[start:stop], positions=self.positions[start:stop])


@functools.lru_cache(maxsize=8)
def row_places(cu_seqlens: tuple[int, ...], cp: int, cp_rank: int) -> RowPlaces:
    """Return the positions of a context-parallel rank's tokens.

    Args:
        cu_seqlens: cumulative lengths of the row's sequences, from 0 to T; each length is a multiple of 2 * cp if cp > 1.
    """
    positions = torch.cat([zigzag(end - start, cp) for start, end in pairwise(cu_seqlens)], dim=1)
    lengths = torch.tensor(cu_seqlens).diff()
    rows = positions + torch.tensor(cu_seqlens[:-1]).repeat_interleave(lengths // cp)
    return RowPlaces(rows[cp_rank], positions[cp_rank], rows.flatten().argsort(), int(lengths.max()))


@torch.no_grad()
def choose_tokens(queries: Tensor, head_weights: Tensor, keys: Tensor, places: RowPlaces, top_k: int) -> Tensor:
    """Choose, for each query, the `top_k` tokens with the highest scores among the tokens of its sequence up to it; all if there are fewer.

    score(i, j) = sum_h weight(i, h) * relu(query(i, h) . key(j)), in float32. A positive factor does not change the choice.

    Args:
        queries: [n, H, D] queries of the tokens in `places`.
        head_weights: [n, H] weights of the heads.
        keys: [T, D] keys of the whole row.

    Returns:
        [n, min(top_k, longest sequence)] int32 indices into the row, not sorted; -1 if there are no more tokens.
    """
    chosen = torch.full((len(queries), min(top_k, places.longest)), -1, dtype=torch.int32, device=queries.device)
    for first, last in _within_sequences(places, num_heads=queries.size(1)):
        rows = places.rows[first:last]
        start, end = int(rows[0] - places.positions[first]), int(rows[-1]) + 1
        products = F.relu(queries[first:last].float() @ keys[start:end].float().T)
        scores = (head_weights[first:last, None].float() @ products).squeeze(1)
        unseen = torch.arange(start, end, device=scores.device) > rows.to(scores.device)[:, None]
        best, found = scores.masked_fill_(unseen, -torch.inf).topk(min(top_k, end - start), dim=-1, sorted=False)
        chosen[first:last, : found.size(1)] = torch.where(best == -torch.inf, -1, found + start).int()
    return chosen


def _within_sequences(places: RowPlaces, *, num_heads: int) -> Iterator[tuple[int, int]]:
    """Yield chunks of tokens as (first, last + 1), each within one sequence and with scores that fit the memory limit."""
    starts = places.rows - places.positions
    bounds = [0, *(starts.diff().nonzero().squeeze(1) + 1).tolist(), len(starts)]
    for first, last in pairwise(bounds):
        if first == last:
            continue
        row_bytes = 4 * num_heads * (int(places.positions[last - 1]) + 1)
        size = max(1, _CHUNK_BYTES // row_bytes)
        yield from ((begin, min(begin + size, last)) for begin in range(first, last, size))


def attend(queries: Tensor, latents: Tensor, chosen: Tensor, *, value_size: int, scale: float) -> Tensor:
    """Return the [L, H, value_size] softmax attention of every query to its chosen tokens. All heads share keys and values.

    This is latent attention with absorbed projections (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), in float32. Only the arguments are
    saved for the backward pass, which recomputes the scores.

    Args:
        queries: [L, H, W]
        latents: [T, W] keys of the whole row; their first `value_size` elements are the values.
        chosen: [L, K] int32 indices into the row, -1 for none; at least one token for each query.
    """
    output: Tensor = _Attention.apply(queries, latents, chosen, value_size, scale)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, latents: Tensor, chosen: Tensor, value_size: int, scale: float) -> Tensor:
        ctx.save_for_backward(queries, latents, chosen)
        ctx.value_size, ctx.scale = value_size, scale
        output = queries.new_empty(*queries.shape[:2], value_size)
        for part in _chunks(queries, chosen):
            keys, shares = _shares(queries[part], latents, chosen[part], scale)
            output[part] = (shares @ keys[..., :value_size]).to(output.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        queries, latents, chosen = ctx.saved_tensors
        of_queries, of_latents = torch.empty_like(queries), torch.zeros_like(latents, dtype=torch.float32)
        for part in _chunks(queries, chosen):
            keys, shares = _shares(queries[part], latents, chosen[part], ctx.scale)
            outer = gradient[part].float()
            of_shares = outer @ keys[..., : ctx.value_size].transpose(1, 2)
            of_scores = ctx.scale * shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True))
            of_queries[part] = (of_scores @ keys).to(queries.dtype)
            of_keys = of_scores.transpose(1, 2) @ queries[part].float()
            of_keys[..., : ctx.value_size] += shares.transpose(1, 2) @ outer
            of_latents.index_add_(0, chosen[part].clamp(min=0).flatten(), of_keys.flatten(0, 1))  # zeros where `chosen` is -1
        return of_queries, of_latents.to(latents.dtype), None, None, None


def _shares(queries: Tensor, latents: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the [C, K, W] float32 keys of the chosen tokens, and the [C, H, K] attention weights, for a chunk of C queries."""
    keys = latents[chosen.clamp(min=0)].float()
    scores = scale * (queries.float() @ keys.transpose(1, 2))
    return keys, scores.masked_fill_((chosen < 0)[:, None], -torch.inf).softmax(-1)


def _chunks(queries: Tensor, chosen: Tensor) -> Iterator[slice]:
    """Yield chunks of queries whose temporary tensors (keys, scores and their gradients) fit the memory limit."""
    (num_queries, num_heads, width), num_chosen = queries.shape, chosen.size(1)
    size = max(1, _CHUNK_BYTES // (4 * num_chosen * (2 * width + 4 * num_heads)))
    return (slice(first, first + size) for first in range(0, num_queries, size))
