"""Tree of the tokens in a row: sequences with common prefixes, each prefix stored once."""

from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class NodeShape(NamedTuple):
    """Size of a node and of its prefix."""

    num_before: int
    """Number of tokens on the path from the root, without the node."""
    length: int
    """Number of tokens of the node."""


class TokenTree:
    """Forest over the T tokens of a row: a node is a run of consecutive tokens, and its children follow it, depth first.

    A token attends to the earlier tokens of its node and to all tokens of the node's ancestors.

    Args:
        starts: [N + 1] first token of each node, ascending from 0, and T.
        parents: [N] parent of each node; -1 for a root.
    """

    def __init__(self, starts: tuple[int, ...], parents: tuple[int, ...]) -> None:
        self.starts = starts
        self.parents = parents

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def with_padding(self, num_tokens: int) -> "TokenTree":
        """Return the tree of a row padded to `num_tokens` tokens; the added tokens form another root."""
        if num_tokens == self.num_tokens:
            return self
        return TokenTree((*self.starts, num_tokens), (*self.parents, -1))

    def cut(self, piece: int) -> "TokenTree":
        """Return the same tree with nodes split at every `piece` tokens of the row; each part is the parent of the next."""
        starts = sorted({*self.starts, *range(0, self.num_tokens, piece)})
        first_of = dict(zip(starts, range(len(starts))))
        ends = [first_of[end] - 1 for end in self.starts[1:]]  # last part of each node
        above = {first_of[start]: parent for start, parent in zip(self.starts, self.parents)}
        parents = [ends[above[part]] if above.get(part, -1) >= 0 else -1 if part in above else part - 1 for part in range(len(starts) - 1)]
        return TokenTree(tuple(starts), tuple(parents))

    @cached_property
    def lengths(self) -> list[int]:
        """[N] number of tokens of each node."""
        return [end - start for start, end in pairwise(self.starts)]

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """[N] indices of the nodes from the root to each node, itself included."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((node,) if parent < 0 else (*paths[parent], node))
        return paths

    @cached_property
    def shapes(self) -> list[NodeShape]:
        """[N] shape of each node."""
        totals = [sum(self.lengths[node] for node in path) for path in self.paths]
        return [NodeShape(total - length, length) for total, length in zip(totals, self.lengths)]

    @cached_property
    def nodes_by_shape(self) -> list[tuple[NodeShape, list[int]]]:
        """Nodes grouped by shape, for batched computation."""
        nodes = sorted(range(len(self.lengths)), key=lambda node: self.shapes[node])
        return [(shape, list(same)) for shape, same in groupby(nodes, key=lambda node: self.shapes[node])]

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """[T] position of each token in its sequences, from 0."""
        return np.concatenate([np.arange(shape.length) + shape.num_before for shape in self.shapes])

    @cached_property
    def path_tokens(self) -> NDArray[np.int64]:
        """[sum of path lengths] positions in the row of the tokens from the root to the end of each node, node by node."""
        own = [np.arange(start, end) for start, end in pairwise(self.starts)]
        return np.concatenate([own[node] for path in self.paths for node in path])

    @cached_property
    def path_starts(self) -> list[int]:
        """[N + 1] first entry of each node in `path_tokens`."""
        return [0, *np.cumsum([shape.num_before + shape.length for shape in self.shapes]).tolist()]
