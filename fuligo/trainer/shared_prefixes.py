"""Prefixes that samples share, and the row of a micro-batch that holds each of them once.

Samples in lexicographic order form a trie: it is enough to know how many tokens each sample shares with the one before it. What a set of
neighbors costs together follows: f(length) of each sample, less f(shared), for tokens as for FLOPs. Pure.
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
    """Trie of sequences: those that share a prefix are neighbors."""

    order: tuple[int, ...]
    """[S] positions of the sequences, in lexicographic order."""
    shared: tuple[int, ...]
    """[S] tokens that the sequence at the same place of `order` shares with the one before it there, and that are computed once."""


@dataclass(slots=True, frozen=True)
class RowLayout:
    """Places of samples in a row that holds the tokens of shared prefixes once."""

    tree: TokenTree
    slots: list[NDArray[np.int64]]
    """[S][L] places of each sample's tokens in the row."""


def find_shared_prefixes(
    sequences: Sequence[IntArray], *, routing: Sequence[RoutedExperts | None] = (), look_ahead: int = 0, min_saved: int = MIN_SAVED_TOKENS
) -> SharedPrefixes:
    """Return the trie of the sequences, without forks that save fewer than `min_saved` tokens.

    Args:
        sequences: tokens of each that are computed.
        routing: [at most T, M, K] experts that each names for its tokens, which are sent there; empty: none names any. Tokens with other
            experts, or with experts recorded for only one of the sequences, are not shared.
        look_ahead: tokens that a token's computation knows of those that follow it (MTP): tokens with other followers are not shared.
    """
    keys = [np.ascontiguousarray(tokens, dtype=">u4").tobytes() for tokens in sequences]  # bytes that sort as the numbers do
    order = sorted(range(len(sequences)), key=lambda i: (keys[i], i))
    shared = [0]
    for a, b in pairwise(order):
        common = max(0, _common_length(sequences[a], sequences[b]) - look_ahead)
        shared.append(min(common, _equally_routed(routing[a], routing[b], common)) if routing else common)
    return SharedPrefixes(tuple(order), tuple(_worthwhile(shared[: len(order)], min_saved)))


def _equally_routed(first: RoutedExperts | None, second: RoutedExperts | None, num_tokens: int) -> int:
    """Return how many of the first `num_tokens` tokens both name the same experts for, or none."""
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
    """Lower `shared` at forks that save fewer than `min_saved` tokens to the depth of the fork above them."""
    kept = [0] * len(shared)
    parts = [(0, len(shared), 0)] if shared else []
    while parts:  # neighbors start to end - 1, which share at least `depth` tokens
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
    """Lay samples into a row, each after the prefix that it shares with the one before.

    Args:
        lengths: [S] tokens of each sample, at least one.
        shared: [S] tokens that each shares with the one before it, at most the length of either.
    """
    slots: list[NDArray[np.int64]] = []
    parent_of: dict[int, int] = {}  # first slot of each node -> slot before it in its sequences, -1 at a root
    path, total = np.empty(0, np.int64), 0
    for length, common in zip(lengths, shared, strict=True):
        if length > common:
            above = int(path[common - 1]) if common else -1
            if above < 0 or above != total - 1:  # else the node continues
                parent_of[total] = above
                if above >= 0:
                    parent_of.setdefault(above + 1, above)
        path = np.concatenate([path[:common], np.arange(total, total + length - common)])
        total += length - common
        slots.append(path)
    starts = sorted(parent_of)
    parents = np.searchsorted(starts, [parent_of[start] for start in starts], side="right") - 1
    return RowLayout(TokenTree((*starts, total), tuple(parents.tolist())), slots)
