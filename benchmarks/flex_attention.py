"""FlexAttention over a row that is a tree, to compare with the varlen kernel that the trainer uses (`shared_prefixes.py --kernels`)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fuligo.models.token_tree import TokenTree


def subtree_ends(tree: TokenTree) -> Tensor:
    """Return [T] end of the subtree below each token: token q attends to token k if k <= q < ends[k]."""
    ends = list(tree.starts[1:])
    for node in reversed(range(len(ends))):  # a node's subtree ends where its last child's does
        parent = tree.parents[node]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[node])
    return torch.from_numpy(np.repeat(np.array(ends, np.int64), tree.lengths))


def block_mask(tree: TokenTree, device: torch.device) -> BlockMask:
    """Return FlexAttention's block mask of the row."""
    ends = subtree_ends(tree).to(device)

    def attends(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return create_block_mask(attends, None, None, tree.num_tokens, tree.num_tokens, device=device)


def flex_tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, scale: float) -> Tensor:
    """Compute `tree_attention` with FlexAttention, compiled: query [T, H, D], key and value [T, Hkv, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out: Any = _compiled_flex_attention()(q, k, v, block_mask=mask, scale=scale, enable_gqa=query.size(1) != key.size(1))
    return out.squeeze(0).transpose(0, 1)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
