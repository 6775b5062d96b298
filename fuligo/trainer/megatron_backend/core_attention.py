"""Attention over packed rows, used without TransformerEngine and where it has no kernel: Megatron's local attention supports no packing.

Each sequence is cut into 2 * cp equal pieces, and context-parallel rank r holds the pieces r and 2 * cp - 1 - r (zigzag, as in
TransformerEngine and load-balanced Ring Attention), so that all ranks have equal work under a causal mask. Keys and values are gathered
over the ranks; queries stay on their rank.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from fuligo.models.attention import packed_attention
from fuligo.models.token_tree import TokenTree
from fuligo.models.tree_attention import tree_attention


class PackedCoreAttention(MegatronModule):
    """Causal softmax attention within each sequence of a packed row, with grouped heads. Heads of keys and values may differ in size."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        """Accept the arguments that Megatron passes to every core attention; cp_comm_type, k_channels and v_channels are ignored."""
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.causal and attention_type == "self"
        assert config.attention_dropout == 0
        self.softmax_scale = softmax_scale
        self.group = pg_collection.cp
        self.window: int | None = None
        """Number of tokens that a token attends to, including itself; None: all tokens up to it."""
        which: Any = config.window_attn_skip_freq
        if config.window_size and is_layer_window_attention(config.window_size, which, layer_number):
            before, after = config.window_size
            assert after == 0
            self.window = before + 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedSeqParams, **_: object
    ) -> Tensor:
        """Compute attention; return [T / cp, H * Dv].

        Args:
            query: [T / cp, H, D] this rank's pieces of every sequence, in order.
            key: [T / cp, Hkv, D], with H a multiple of Hkv.
            value: [T / cp, Hkv, Dv]
            attention_mask: None; sequences and causality define the mask.
            packed_seq_params: cumulative lengths of the whole row (each length a multiple of 2 * cp if cp > 1); `RowSequences` if the row
                has a tree.
        """
        assert attention_mask is None
        scale = self.softmax_scale if self.softmax_scale is not None else query.size(-1) ** -0.5
        tree: TokenTree | None = getattr(packed_seq_params, "tree", None)
        if tree is not None:
            return self._over_tree(query, key, value, tree, scale).flatten(1)
        cu_seqlens = packed_seq_params.cu_seqlens_q.tolist()
        if self.group.size() == 1:
            return packed_attention(query, key, value, cu_seqlens, scale=scale, window=self.window).flatten(1)
        keys, values = gather_pieces(key, self.group), gather_pieces(value, self.group)
        outputs = []
        for start, end in pairwise(cu_seqlens):
            here = slice(start // self.group.size(), end // self.group.size())
            positions = zigzag(end - start, self.group.size()).to(query.device)
            in_order = positions.flatten().argsort()
            k, v = keys[:, here].flatten(0, 1)[in_order], values[:, here].flatten(0, 1)[in_order]
            queries, every = positions[self.group.rank(), :, None], torch.arange(end - start, device=query.device)
            visible = queries >= every
            if self.window is not None:
                visible &= queries - every < self.window
            q, k, v = (x.transpose(0, 1) for x in (query[here], k, v))
            output = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _over_tree(self, query: Tensor, key: Tensor, value: Tensor, tree: TokenTree, scale: float) -> Tensor:
        """Return the [T / cp, H, Dv] attention of this rank's tokens: pieces r and 2 * cp - 1 - r of the tree's row."""
        cp, rank = self.group.size(), self.group.rank()
        if cp == 1:
            return tree_attention(query, key, value, tree, scale=scale, window=self.window)
        in_order = zigzag(tree.num_tokens, cp).flatten().argsort().to(query.device)
        keys, values = (gather_pieces(each, self.group).flatten(0, 1)[in_order] for each in (key, value))
        piece = tree.num_tokens // (2 * cp)
        pieces = _cut(tree, piece)
        nodes = tuple(node for node, start in enumerate(pieces.starts[:-1]) if start // piece in (rank, 2 * cp - 1 - rank))
        return tree_attention(query, keys, values, pieces, scale=scale, window=self.window, nodes=nodes)


_cut = lru_cache(maxsize=8)(TokenTree.cut)  # shared by all layers of a pass


def zigzag(length: int, cp: int) -> Tensor:
    """Return the [cp, length / cp] positions in a sequence that each context-parallel rank holds, in the rank's order.

    If cp > 1, the length must be a multiple of 2 * cp.
    """
    if cp == 1:
        return torch.arange(length)[None]
    pieces = torch.arange(length).view(2 * cp, -1)
    return torch.stack([torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]]) for rank in range(cp)])


def gather_pieces(piece: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather all ranks' pieces, [n, ...] -> [cp, n, ...]. In the backward pass, the gradients of a piece are summed over the ranks."""
    return gather_from_sequence_parallel_region(piece, group=group).unflatten(0, (group.size(), -1))
