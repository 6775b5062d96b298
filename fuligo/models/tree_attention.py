"""Attention over a row that is a tree: each token attends only to its own prefix.

A node of the tree attends to the tokens from the root to its own end, with a causal mask aligned to the right: its last token attends to
all of them. Varlen flash kernels compute this as a sequence of queries with a longer sequence of keys; elsewhere, SDPA computes it with a
mask.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuligo.models.attention import fits_flash_kernel, masked_attention, size_tensor
from fuligo.models.batch_invariant import causal_attention
from fuligo.models.gpu_invariant import paged_attention
from fuligo.models.sink_attention import VarlenKernel, batched_with_sinks, flash_with_sinks
from fuligo.models.token_tree import NodeShape, TokenTree


class TreeRow(NamedTuple):
    """Indices of a tree on a device, for the varlen kernel: each node is a sequence of queries with a sequence of keys."""

    starts: Tensor
    """[N + 1] int32 start of each node's queries."""
    path_starts: Tensor
    """[N + 1] int32 start of each node's keys."""
    path_tokens: Tensor
    """[K] int64 token of each key."""
    longest: Tensor
    """[L] with unused values, where L is the length of the longest node; see `VarlenRow`."""
    longest_path: Tensor
    """[P] with unused values, where P is the length of the longest path."""


@lru_cache(maxsize=8)
def tree_row(tree: TokenTree, device: torch.device, nodes: tuple[int, ...] | None = None) -> TreeRow:
    """Return the tree's indices on the device; cached for all layers of a pass. `nodes`: nodes whose tokens are the queries; None: all."""
    chosen = range(len(tree.lengths)) if nodes is None else nodes
    lengths = [tree.lengths[node] for node in chosen]
    paths = [tree.path_tokens[tree.path_starts[node] : tree.path_starts[node + 1]] for node in chosen]
    longest, longest_path = max(lengths), max(len(path) for path in paths)
    with torch.inference_mode(False):  # the cache also serves passes with gradient
        starts, path_starts = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in (lengths, [len(path) for path in paths])
        )
        tokens = torch.from_numpy(np.concatenate(paths)).to(device)
        return TreeRow(starts, path_starts, tokens, size_tensor(longest, device), size_tensor(longest_path, device))


def varlen_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, row: TreeRow, *, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute `tree_attention` with one flash kernel, on CUDA in half precision; `torch.compile` can trace it.

    Keys and values of shared prefixes are copied for each branch, so attention costs as much as without sharing. Without sinks the copies
    are not kept, since for long episodes they would take most of the memory; the backward pass makes them again.
    """
    longest, longest_path = row.longest.size(0), row.longest_path.size(0)
    if sinks is not None:
        kernel = VarlenKernel(row.starts, row.path_starts, longest, longest_path, scale, window)
        return flash_with_sinks(kernel, query, take_rows(key, row.path_tokens), take_rows(value, row.path_tokens), sinks)
    result: Tensor = _PathAttention.apply(
        query, key, value, row.starts, row.path_starts, row.path_tokens, longest, longest_path, scale, window
    )
    return result


class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        path_starts: Tensor,
        path_tokens: Tensor,
        longest: int,
        longest_path: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        kernel = VarlenKernel(starts, path_starts, longest, longest_path, scale, window)
        out, log_sum_exp = kernel.forward(query, key.index_select(0, path_tokens), value.index_select(0, path_tokens))
        ctx.save_for_backward(query, key, value, out, log_sum_exp, starts, path_starts, path_tokens)
        ctx.longest, ctx.longest_path, ctx.scale, ctx.window = longest, longest_path, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value, out, log_sum_exp, starts, path_starts, path_tokens = ctx.saved_tensors
        kernel = VarlenKernel(starts, path_starts, ctx.longest, ctx.longest_path, ctx.scale, ctx.window)
        keys, values = key.index_select(0, path_tokens), value.index_select(0, path_tokens)
        of_query, of_keys, of_values = kernel.backward(grad, query, keys, values, out, log_sum_exp)
        of_key, of_value = (_add_rows(each, path_tokens, key.size(0)) for each in (of_keys, of_values))
        return of_query, of_key, of_value, *[None] * 7


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Select rows, with gradients added in float32: in bfloat16 a sum over many branches would lose small terms."""
    result: Tensor = _TakeRows.apply(x, rows)
    return result


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = x.size(0)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        (rows,) = ctx.saved_tensors
        return _add_rows(grad, rows, ctx.num_rows), None


def _add_rows(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the sums [num_rows, ...] of the gradients of selected rows, added in float32."""
    total = torch.zeros(num_rows, *grad.shape[1:], dtype=torch.float32, device=grad.device)
    return total.index_add_(0, rows, grad.float()).to(grad.dtype)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TokenTree,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    nodes: tuple[int, ...] | None = None,
) -> Tensor:
    """Return softmax attention [T, H, Dv] of each of the tree's T tokens to its prefix; arguments are as in `packed_attention`.

    On CUDA in half precision one kernel computes all nodes. Elsewhere, nodes of equal length with prefixes of equal length share a batched
    SDPA call.

    `nodes`: nodes, ascending, whose Q tokens are the queries [Q, H, D]; None: all.
    """
    if fits_flash_kernel(query, value):
        return varlen_tree_attention(query, key, value, tree_row(tree, query.device, nodes), scale=scale, window=window, sinks=sinks)
    own = tuple(range(len(tree.lengths))) if nodes is None else nodes
    queries = dict(zip(own, query.split([tree.lengths[node] for node in own])))
    keys, values = (x.split(tree.lengths) for x in (key, value))
    outputs: dict[int, Tensor] = {}
    for shape, alike in tree.nodes_by_shape:
        computed = [node for node in alike if node in queries]
        if not computed:
            continue
        path = [above for node in computed for above in tree.paths[node]]
        q = torch.stack([queries[node] for node in computed])
        k, v = (torch.cat([each[node] for node in path]).unflatten(0, (len(computed), -1)) for each in (keys, values))
        outputs |= zip(computed, _attend(q, k, v, shape, scale=scale, window=window, sinks=sinks))
    return torch.cat([outputs[node] for node in own])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, shape: NodeShape, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attend from [B, L, H, D] to [B, P + L, Hkv, D]: each query to the P tokens before its node, and causally within the node."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    is_whole = window is None or window >= k.size(2)
    mask = None if is_whole and not shape.num_before else _node_mask(shape, None if is_whole else window, query.device)
    if sinks is not None:
        return batched_with_sinks(q, k, v, sinks, scale=scale, visible=mask).transpose(1, 2)
    return masked_attention(q, k, v, mask, scale=scale).transpose(1, 2)


@lru_cache(maxsize=8)
def _node_mask(shape: NodeShape, window: int | None, device: torch.device) -> Tensor:
    """Return the [L, P + L] mask, True where the row's token attends to the column's."""
    visible = torch.ones(shape.length, shape.num_before + shape.length, dtype=torch.bool, device=device).tril(shape.num_before)
    return visible if window is None else visible.triu(shape.num_before + 1 - window)


def invariant_tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: TokenTree, *, scale: float) -> Tensor:
    """Compute `tree_attention` with results bitwise equal to `batch_invariant.causal_attention` over each sequence.

    On a CPU every branch is computed with its whole prefix, so attention costs as much as without sharing.
    """
    if query.is_cuda:
        result: Tensor = _InvariantTree.apply(query, key, value, tree_row(tree, query.device), scale)
        return result
    rows, starts, first = _branches(tree, query.device)
    q, k, v = (take_rows(each, rows) for each in (query, key, value))
    return causal_attention(q, k, v, starts, scale=scale).index_select(0, first)


class _InvariantTree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: TreeRow, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.row, ctx.scale = row, scale
        return paged_attention(query, key, value, row.starts, row.path_starts, row.path_tokens, longest=row.longest.size(0), scale=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            ordinary = varlen_tree_attention(query, key, value, ctx.row, scale=ctx.scale)
            return (*torch.autograd.grad(ordinary, (query, key, value), grad), None, None)


@lru_cache(maxsize=8)
def _branches(tree: TokenTree, device: torch.device) -> tuple[Tensor, tuple[int, ...], Tensor]:
    """Return the tokens of all root-to-leaf sequences, the starts of these sequences, and the first index of each tree token in them."""
    leaves = sorted(set(range(len(tree.lengths))) - set(tree.parents), key=lambda node: sum(tree.shapes[node]))
    paths = [tree.path_tokens[tree.path_starts[node] : tree.path_starts[node + 1]] for node in leaves]
    rows = np.concatenate(paths)
    first = np.unique(rows, return_index=True)[1]
    with torch.inference_mode(False):  # the cache also serves passes with gradient
        starts = (0, *accumulate(len(path) for path in paths))
        return torch.from_numpy(rows).to(device), starts, torch.from_numpy(first).to(device)
