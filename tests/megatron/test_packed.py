"""Packed rows of tokens on the ranks of a layout."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.layout.megatron import Layout
from fuligo.trainer.batch import PackedTokens, pack_tokens
from fuligo.trainer.megatron_backend.packed import PackedRow, pack_row
from tests import train_batches

layouts = st.builds(
    lambda tp, cp, sp: Layout(tp=tp, cp=cp, sequence_parallel=sp and tp > 1, num_ranks=tp * cp),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 17)), min_size=1, max_size=5)


def rows_of(tokens: PackedTokens, layout: Layout, pad_multiple: int) -> list[PackedRow]:
    return [pack_row(tokens, layout, rank, pad_multiple=pad_multiple) for rank in range(layout.cp)]


def padded_sequences(row: PackedRow) -> list[tuple[int, int]]:
    return list(pairwise(row.packed_seq_params.cu_seqlens_q.tolist()))


@given(lengths=lengths, layout=layouts, pad_multiple=st.sampled_from([1, 8, 10]))
@settings(max_examples=60)
def test_lengths_divide_as_the_layout_needs(lengths, layout: Layout, pad_multiple: int):
    tokens = pack_tokens(train_batches.samples(lengths), torch.device("cpu"))
    rows = rows_of(tokens, layout, pad_multiple)
    for row in rows:
        assert row.input_ids.shape == row.position_ids.shape == (1, row.num_tokens // layout.cp)
        assert row.num_tokens % pad_multiple == 0
        assert row.input_ids.size(1) % (layout.tp if layout.sequence_parallel else 1) == 0
        assert padded_sequences(row) == padded_sequences(rows[0])
        assert padded_sequences(row)[-1][1] == row.num_tokens
        assert row.packed_seq_params.max_seqlen_q == max(end - start for start, end in padded_sequences(row))
        assert all((end - start) % layout.row_multiple == 0 for start, end in padded_sequences(row))


@given(lengths=lengths, layout=layouts, pad_multiple=st.sampled_from([1, 8, 10]))
@settings(max_examples=60)
def test_ranks_together_have_every_sequence_in_zigzag_pieces_with_padding_after_it(lengths, layout: Layout, pad_multiple: int):
    """Joined piece by piece, the rows of all ranks are the sequences, each followed by padding."""
    tokens = pack_tokens(train_batches.samples(lengths), torch.device("cpu"))
    rows = rows_of(tokens, layout, pad_multiple)
    sequences = list(pairwise(tokens.cu_seqlens))
    for number, (start, end) in enumerate(padded_sequences(rows[0])):
        pieces = [None] * (2 * layout.cp)
        for rank, row in enumerate(rows):
            own = slice(start // layout.cp, end // layout.cp)
            columns = torch.stack([row.input_ids[0, own], row.position_ids[0, own]])
            if layout.cp == 1:
                pieces = [columns]
            else:
                pieces[rank], pieces[-1 - rank] = columns.chunk(2, dim=1)
        ids, positions = torch.cat(pieces, dim=1)
        assert positions.tolist() == list(range(end - start))
        if number < len(sequences):
            first, last = sequences[number]
            assert ids[: last - first].tolist() == tokens.input_ids[first:last].tolist()
            assert last - first > end - start - layout.row_multiple
        else:
            assert number == len(sequences), "at most one sequence is padding"


@given(lengths=lengths, layout=layouts)
@settings(max_examples=60)
def test_every_prediction_is_made_once_and_where_its_token_is(lengths, layout: Layout):
    samples = train_batches.samples(lengths)
    tokens = pack_tokens(samples, torch.device("cpu"))
    rows = rows_of(tokens, layout, 1)
    assert sorted(torch.cat([row.local_ids for row in rows]).tolist()) == list(range(len(tokens.targets)))
    for row in rows:
        at = tokens.predicting_positions[row.local_ids]
        assert row.input_ids[0, row.local_rows].tolist() == tokens.input_ids[at].tolist()
        assert row.position_ids[0, row.local_rows].tolist() == tokens.position_ids[at].tolist()


def test_a_row_can_be_made_as_long_as_others():
    tokens = pack_tokens(train_batches.samples([(2, 3), (1, 5)]), torch.device("cpu"))
    row = pack_row(tokens, Layout(cp=2, num_ranks=2), 0, pad_multiple=1, num_tokens=32)
    assert padded_sequences(row) == [(0, 4), (4, 12), (12, 32)]
