"""Packed tokens as Megatron's layers take them: one context-parallel rank's part of every sequence, padded if needed.

Indices are computed on the host with NumPy: torch wakes its threads for every operation, which costs more than the operation.

Padding follows the tokens of its sequence, or is a sequence of its own at the end of the row: under a causal mask no token sees it.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from fuligo.layout.megatron import Layout
from fuligo.trainer.batch import PackedTokens
from fuligo.trainer.megatron_backend.core_attention import zigzag

Places = NDArray[np.int64]
PADDING_ID = 0
"""Any token: no other token sees it, and nothing is predicted there."""


@dataclass
class RowSequences(PackedSeqParams):
    """Sequences of a row, and its tokens' choices in sparse attention."""

    chosen_tokens: dict[int, Tensor] = field(default_factory=dict)
    """Choice of each layer, counted from 0, as `choose_tokens` returns it: kept for layers that reuse it until their backward pass, since
    they may be computed again.
    """


@dataclass(slots=True, frozen=True)
class LaterTokens:
    """Inputs and targets of an MTP layer at each token of a row: at depth k, the token k further and the one after that."""

    input_ids: Tensor
    """[1, L] int64, of the same sequence; padding after its end."""
    local_rows: Tensor
    """[m] int64 index into the L tokens: the hidden state there predicts a response token of the same sequence."""
    local_ids: Tensor
    """[m] int64 index into the N: the response token predicted there."""


@dataclass(slots=True, frozen=True)
class PackedRow:
    """One rank's part of a micro-batch: L = T / cp tokens of the row's T, and n of the micro-batch's N predictions."""

    input_ids: Tensor
    """[1, L] int64"""
    position_ids: Tensor
    """[1, L] int64, from 0 in every sequence."""
    packed_seq_params: RowSequences
    """Sequences of the whole row; lengths include padding."""
    num_tokens: int
    """T"""
    local_rows: Tensor
    """[n] int64 index into the L tokens: the hidden state there predicts a response token."""
    local_ids: Tensor
    """[n] int64 index into the N: the response token predicted there. Each is on exactly one context-parallel rank."""
    sequence_ids: Tensor
    """[L] int64 number of the token's sequence in the micro-batch; -1 for padding, and for repetitions."""
    source: Tensor
    """[L] int64, on the host: index of the token in the micro-batch; -1 for padding."""
    later: tuple[LaterTokens, ...]
    """For each MTP layer that runs, in order."""


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
    """Pack the part of context-parallel rank `cp_rank`.

    Args:
        layout: CP and TP decide what lengths must be multiples of.
        cp_rank: from 0 to `layout.cp` - 1.
        pad_multiple: T is a multiple of it.
        num_tokens: T, if micro-batches or ranks must agree on it; at least `Layout.row_tokens` of each. None: that of this one.
        counts: False for a repeated micro-batch, whose tokens are padding to the routers, too.
    """
    device = tokens.input_ids.device
    lengths = layout.padded_lengths(end - start for start, end in pairwise(tokens.cu_seqlens))
    total = layout.row_tokens(lengths, pad_multiple) if num_tokens is None else num_tokens
    padding = total - sum(lengths)
    assert padding >= 0 and total % layout.total_multiple(pad_multiple) == 0
    lengths += [padding] if padding else []
    positions = np.concatenate([zigzag(length, layout.cp)[cp_rank].numpy() for length in lengths])
    source, rows, sequences = _places(tokens, lengths, positions, layout.cp)
    local_rows = _on(device, rows)[tokens.predicting_positions]
    local_ids = (local_rows >= 0).nonzero().squeeze(1)
    return PackedRow(
        input_ids=_with_padding(tokens.input_ids)[_on(device, source)][None],
        position_ids=_on(device, positions)[None],
        packed_seq_params=_packed_seq_params(lengths, layout.cp, device),
        num_tokens=total,
        local_rows=local_rows[local_ids],
        local_ids=local_ids,
        sequence_ids=_on(device, sequences if counts else np.full_like(sequences, -1)),
        source=torch.from_numpy(source),
        later=tuple(_later_tokens(tokens, source, rows, depth) for depth in range(1, num_mtp_layers + 1)),
    )


def _later_tokens(tokens: PackedTokens, source: Places, rows: Places, depth: int) -> LaterTokens:
    """Shift the tokens for the MTP layer that predicts `depth` tokens further, from 1; `source` and `rows` are those of `_places`."""
    device = tokens.input_ids.device
    bounds = np.array(tokens.cu_seqlens)
    starts, ends = (np.repeat(bound, np.diff(bounds)) for bound in (bounds[:-1], bounds[1:]))
    has_later = (source >= 0) & (source + depth < ends[source])
    later = np.where(has_later, source + depth, tokens.num_tokens)
    predicting = tokens.predicting_positions.cpu().numpy() - depth
    earlier_rows = np.where(predicting >= starts[predicting + depth], rows[predicting.clip(min=0)], -1)
    local_ids = np.flatnonzero(earlier_rows >= 0)
    return LaterTokens(
        input_ids=_with_padding(tokens.input_ids)[_on(device, later)][None],
        local_rows=_on(device, earlier_rows[local_ids]),
        local_ids=_on(device, local_ids),
    )


def _with_padding(input_ids: Tensor) -> Tensor:
    """Return [T + 1] tokens with padding at the end, so that index -1 is padding."""
    return torch.cat([input_ids, input_ids.new_tensor([PADDING_ID])])


def _on(device: torch.device, places: Places) -> Tensor:
    return torch.from_numpy(places).to(device)


def _places(tokens: PackedTokens, lengths: list[int], positions: Places, cp: int) -> tuple[Places, Places, Places]:
    """Return the places of tokens in the row and of the row's tokens in the micro-batch.

    [L] index of each row's token among the micro-batch's, -1 for padding; its inverse, -1 for tokens on other ranks; and [L] the
    sequence of each row's token, -1 for padding. `lengths` include padding; `positions` are [L], of this rank's tokens in their sequences.
    """
    starts = np.array([*tokens.cu_seqlens[:-1], tokens.num_tokens][: len(lengths)])
    real = np.array([end - start for start, end in pairwise(tokens.cu_seqlens)] + [0])[: len(lengths)]
    sequence = np.repeat(np.arange(len(lengths)), np.array(lengths) // cp)
    source = np.where(positions < real[sequence], starts[sequence] + positions, -1)
    rows = np.full(tokens.num_tokens, -1)
    rows[source[source >= 0]] = np.flatnonzero(source >= 0)
    return source, rows, np.where(source >= 0, sequence, -1)


def _packed_seq_params(lengths: list[int], cp: int, device: torch.device) -> RowSequences:
    """Build Megatron's parameters of the sequences, in which padding counts as tokens.

    TransformerEngine needs lengths with and without padding only under context parallelism, and compares them in every layer, which waits
    for the GPU.
    """
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    padded = cu_seqlens if cp > 1 else None
    return RowSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,  # pyright: ignore[reportArgumentType]
        cu_seqlens_kv_padded=padded,  # pyright: ignore[reportArgumentType]
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
