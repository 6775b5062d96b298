"""Prefixes that samples share, and the layout of a micro-batch's row that stores each of them once.

Samples in lexicographic order form a trie, which is fully described by the number of tokens that each sample shares with the previous
one. If n tokens cost f(n), in tokens or FLOPs, adjacent samples cost the sum of f(length) - f(shared).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fuligo.layout.flops import MIN_SAVED_TOKENS
from fuligo.models.token_tree import TokenTree
from fuligo.types import IntArray, RoutedExperts


@dataclass(slots=True, frozen=True)
class SharedPrefixes:
    """Trie of sequences, in an order in which sequences with a common prefix are adjacent."""

    order: tuple[int, ...]
    """[S] indices of the sequences, in lexicographic order."""
    shared: tuple[int, ...]
    """[S] number of tokens that each sequence, in `order`, shares with the previous one and that are computed once."""


@dataclass(slots=True, frozen=True)
class RowLayout:
    """Positions of samples in a row that stores shared prefixes once."""

    tree: TokenTree
    slots: list[NDArray[np.int64]]
    """[S][L] row positions of each sample's tokens."""


def find_shared_prefixes(
    sequences: Sequence[IntArray], *, routing: Sequence[RoutedExperts | None] = (), look_ahead: int = 0, min_saved: int = MIN_SAVED_TOKENS
) -> SharedPrefixes:
    """Return the trie of the sequences, without forks that save fewer than `min_saved` tokens.

    Args:
        sequences: computed tokens of each sequence.
        routing: [at most T, M, K] recorded experts of each sequence's tokens, to be replayed; empty: no replay. Tokens whose experts
            differ, or are recorded in only one of the sequences, are not shared.
        look_ahead: number of following tokens that the computation of a token depends on (MTP). Tokens for which these differ are not
            shared.
        min_saved: number of tokens that a fork must save to be kept.
    """
    keys = [np.ascontiguousarray(tokens, dtype=">u4").tobytes() for tokens in sequences]  # bytes that sort as the numbers do
    order = sorted(range(len(sequences)), key=lambda i: (keys[i], i))
    shared = [0]
    for a, b in pairwise(order):
        common = max(0, _common_length(sequences[a], sequences[b]) - look_ahead)
        shared.append(min(common, _equally_routed(routing[a], routing[b], common)) if routing else common)
    return SharedPrefixes(tuple(order), tuple(_worthwhile(shared[: len(order)], min_saved)))


def _equally_routed(first: RoutedExperts | None, second: RoutedExperts | None, num_tokens: int) -> int:
    """Return the length of the prefix, at most `num_tokens`, in which both sequences record the same experts or neither records any."""
    first_known, second_known = (0 if of_tokens is None else len(of_tokens[:num_tokens]) for of_tokens in (first, second))
    length = min(first_known, second_known)
    if first is not None and second is not None:
        differs = np.flatnonzero((first[:length] != second[:length]).any((1, 2)))
        if len(differs):
            return int(differs[0])
    return num_tokens if first_known == second_known else length


def _common_length(first: IntArray, second: IntArray) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differs[0]) if len(differs) else length


def _worthwhile(shared: list[int], min_saved: int) -> list[int]:
    """Return `shared`, with forks that save fewer than `min_saved` tokens moved up to the depth of their parent fork."""
    kept = [0] * len(shared)
    parts = [(0, len(shared), 0)] if shared else []
    while parts:  # sequences start to end - 1, which share at least `depth` tokens
        start, end, depth = parts.pop()
        if end - start < 2:
            continue
        lowest = min(shared[start + 1 : end])
        forks = [i for i in range(start + 1, end) if shared[i] == lowest]
        below = lowest if (lowest - depth) * len(forks) >= min_saved else depth
        for i in forks:
            kept[i] = below
        parts += [(a, b, below) for a, b in zip([start, *forks], [*forks, end])]
    return kept


def lay_out(lengths: Sequence[int], shared: Sequence[int]) -> RowLayout:
    """Lay out samples in a row that stores only once the prefix that a sample shares with the previous one.

    Args:
        lengths: [S] number of tokens of each sample, at least 1.
        shared: [S] number of tokens that each sample shares with the previous one, at most the length of either.
    """
    slots: list[NDArray[np.int64]] = []
    parent_of: dict[int, int] = {}  # first slot of each node -> slot of the token before it, -1 at a root
    path, total = np.empty(0, np.int64), 0
    for length, common in zip(lengths, shared, strict=True):
        if length > common:
            above = int(path[common - 1]) if common else -1
            if above < 0 or above != total - 1:  # otherwise the previous sample's last node continues
                parent_of[total] = above
                if above >= 0:
                    parent_of.setdefault(above + 1, above)
        path = np.concatenate([path[:common], np.arange(total, total + length - common)])
        total += length - common
        slots.append(path)
    starts = sorted(parent_of)
    parents = np.searchsorted(starts, [parent_of[start] for start in starts], side="right") - 1
    return RowLayout(TokenTree((*starts, total), tuple(parents.tolist())), slots)
