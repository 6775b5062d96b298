"""Packed tokens for Megatron's layers: one context-parallel rank's part of every sequence, padded if needed.

Indices are computed on the host with NumPy, because waking torch's threads costs more than these small operations.

Padding follows the tokens of its sequence, or is a separate sequence at the end of the row, so no token attends to it under a causal mask.

A row that stores shared prefixes once is a single sequence for Megatron and is split over the ranks as one. Its tree tells attention which
tokens a token attends to, and its positions tell the rotary embedding the position of each token in its samples.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from fuligo.layout.megatron import Layout
from fuligo.models.token_tree import TokenTree
from fuligo.trainer.batch import PackedTokens
from fuligo.trainer.megatron_backend.core_attention import zigzag
from fuligo.trainer.mtp import LaterTokens, Places, later_tokens, with_padding


@dataclass
class RowSequences(PackedSeqParams):
    """Sequences or tree of a row, and the tokens chosen by sparse attention."""

    tree: TokenTree | None = None
    """Tree of the row's T tokens with padding, if samples share prefixes; the row is then one sequence."""
    positions: Tensor | None = None
    """[T] int64 positions of a tree's tokens in their samples; None without a tree."""
    chosen_tokens: dict[int, Tensor] = field(default_factory=dict)
    """Results of `choose_tokens` by layer, counted from 0. Kept for the layers that reuse them, in forward passes and recomputation."""


@dataclass(slots=True, frozen=True)
class PackedRow:
    """One rank's part of a micro-batch: L = T / cp tokens of the row's T, and n of the micro-batch's N predictions."""

    input_ids: Tensor
    """[1, L] int64 tokens."""
    position_ids: Tensor
    """[1, L] int64, counted from 0 in every sequence; in a tree, in every sample."""
    packed_seq_params: RowSequences
    """Sequences of the whole row; lengths include padding."""
    num_tokens: int
    """T, the number of tokens of the whole row with padding."""
    local_rows: Tensor
    """[n] int64 indices, among the L tokens, of those whose hidden states predict response tokens."""
    local_ids: Tensor
    """[n] int64 indices into the N response tokens: the tokens predicted there. Each index is on exactly one context-parallel rank."""
    sequence_ids: Tensor
    """[L] int64 index of each token's sequence in the micro-batch, 0 in a tree; -1 for padding and in repeated micro-batches."""
    members: Tensor | None
    """[S, L] bool in a tree: True if the token belongs to the sample; all False in a repeated micro-batch. None without a tree."""
    source: Tensor
    """[L] int64 index of each token in the micro-batch, on the host; -1 for padding."""
    later: tuple[LaterTokens, ...]
    """Shifted tokens for each MTP layer that runs, in order."""


def pack_row(
    tokens: PackedTokens,
    layout: Layout,
    cp_rank: int,
    *,
    pad_multiple: int,
    num_tokens: int | None = None,
    num_mtp_layers: int = 0,
    counts: bool = True,
) -> PackedRow:
    """Pack the part of a micro-batch that context-parallel rank `cp_rank` computes.

    Args:
        layout: layout whose CP and TP sizes determine the multiples to pad lengths to.
        cp_rank: context-parallel rank, 0 to `layout.cp` - 1.
        pad_multiple: T is padded to a multiple of it.
        num_tokens: T if all micro-batches or ranks must agree on it, at least `Layout.row_tokens` of each; None: `Layout.row_tokens`.
        num_mtp_layers: number of MTP layers to shift tokens for.
        counts: False for a repeated micro-batch, whose tokens the routers treat as padding.
    """
    device = tokens.input_ids.device
    bounds = np.array(tokens.cu_seqlens if tokens.tree is None else (0, tokens.num_tokens))
    lengths = layout.padded_lengths(np.diff(bounds).tolist())
    total = layout.row_tokens(lengths, pad_multiple) if num_tokens is None else num_tokens
    padding = total - sum(lengths)
    assert padding >= 0 and total % layout.total_multiple(pad_multiple) == 0
    if padding and tokens.tree is None:
        lengths.append(padding)
    elif padding:
        lengths[0] = total
    positions = np.concatenate([zigzag(length, layout.cp)[cp_rank].numpy() for length in lengths])
    source, rows, sequences = _places(bounds, lengths, positions, layout.cp)
    local_rows = _on(device, rows)[tokens.predicting_positions]
    local_ids = (local_rows >= 0).nonzero().squeeze(1)
    sequence_ids = sequences if counts else np.full_like(sequences, -1)
    if tokens.tree is not None:
        positions = np.append(tokens.position_ids.cpu().numpy(), 0)[source]
    return PackedRow(
        input_ids=with_padding(tokens.input_ids)[_on(device, source)][None],
        position_ids=_on(device, positions)[None],
        packed_seq_params=_packed_seq_params(tokens, lengths, layout.cp),
        num_tokens=total,
        local_rows=local_rows[local_ids],
        local_ids=local_ids,
        sequence_ids=_on(device, sequence_ids),
        members=None if tokens.tree is None else torch.from_numpy(_members(tokens, np.where(sequence_ids < 0, -1, source))).to(device),
        source=torch.from_numpy(source),
        later=tuple(later_tokens(tokens, depth, source=source, rows=rows) for depth in range(1, num_mtp_layers + 1)),
    )


def _members(tokens: PackedTokens, source: Places) -> NDArray[np.bool_]:
    """Return [S, L] bool: whether a sample contains a token of this rank's row."""
    members = np.zeros((len(tokens.slots), tokens.num_tokens + 1), np.bool_)
    for own, slots in zip(members, tokens.slots):
        own[slots] = True
    return members[:, source]


def _on(device: torch.device, places: Places) -> Tensor:
    return torch.from_numpy(places).to(device)


def _places(bounds: Places, lengths: list[int], positions: Places, cp: int) -> tuple[Places, Places, Places]:
    """Return the mapping between this rank's row of L tokens and the micro-batch's T' tokens.

    Args:
        bounds: [S + 1] starts of the sequences in the micro-batch, and T'.
        lengths: lengths of the row's sequences with padding.
        positions: [L] positions of this rank's tokens in their sequences.

    Returns:
        [L] index of each row token in the micro-batch, -1 for padding; its inverse [T'], -1 for tokens on other ranks; and [L] sequence of
        each row token, -1 for padding.
    """
    starts, real = (
        np.append(of_sequences, more)[: len(lengths)] for of_sequences, more in ((bounds[:-1], bounds[-1]), (np.diff(bounds), 0))
    )
    sequence = np.repeat(np.arange(len(lengths)), np.array(lengths) // cp)
    source = np.where(positions < real[sequence], starts[sequence] + positions, -1)
    rows = np.full(bounds[-1], -1)
    rows[source[source >= 0]] = np.flatnonzero(source >= 0)
    return source, rows, np.where(source >= 0, sequence, -1)


def _packed_seq_params(tokens: PackedTokens, lengths: list[int], cp: int) -> RowSequences:
    """Build Megatron's parameters of the sequences, whose lengths include padding.

    `cu_seqlens_*_padded` are set only under context parallelism, where TransformerEngine needs them: if they are set, it compares them with
    the unpadded ones in every layer, which synchronizes the GPU.
    """
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens.input_ids.device)
    padded = cu_seqlens if cp > 1 else None
    tree = None if tokens.tree is None else tokens.tree.with_padding(sum(lengths))
    return RowSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,  # pyrefly: ignore[bad-argument-type]
        cu_seqlens_kv_padded=padded,  # pyrefly: ignore[bad-argument-type]
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        tree=tree,
        positions=None if tree is None else _on(cu_seqlens.device, tree.depths),
    )
