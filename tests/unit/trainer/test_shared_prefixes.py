"""The trie of samples and its row: every sample's tokens in order, each shared prefix once, and a token sees only its prefix."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuligo.models.tree_attention import take_rows, tree_attention
from fuligo.trainer.packing import Capacity, pack, sequence_flops
from fuligo.trainer.shared_prefixes import find_shared_prefixes, lay_out

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=10)
"""Three tokens only, so that sequences share prefixes, repeat and extend one another."""


def trie(sequences, min_saved=1):
    found = find_shared_prefixes([np.array(tokens, np.int32) for tokens in sequences], min_saved=min_saved)
    ordered = [sequences[i] for i in found.order]
    return found, ordered, lay_out([len(tokens) for tokens in ordered], found.shared)


@given(SEQUENCES, st.integers(1, 12))
@example([[0, 1], [0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 0]], 1)
def test_row_reads_every_sequence_at_its_slots(sequences, min_saved):
    found, ordered, layout = trie(sequences, min_saved)
    assert sorted(found.order) == list(range(len(sequences)))
    row = np.full(layout.tree.num_tokens, -1)
    for tokens, slots, shared, before in zip(ordered, layout.slots, found.shared, [[], *ordered]):
        assert tokens[:shared] == before[:shared]
        assert (row[slots[:shared]] == tokens[:shared]).all(), "the shared tokens are in the row already"
        assert (row[slots[shared:]] == -1).all(), "the others are not"
        row[slots] = tokens
        assert (layout.tree.depths[slots] == np.arange(len(tokens))).all()
    assert (row >= 0).all(), "the row holds no token without a sample"


@given(SEQUENCES)
def test_row_holds_every_distinct_prefix_once(sequences):
    prefixes = {tuple(tokens[:n]) for tokens in sequences for n in range(1, len(tokens) + 1)}
    assert trie(sequences)[2].tree.num_tokens == len(prefixes)


@given(SEQUENCES, st.integers(2, 12))
def test_every_fork_saves_enough(sequences, min_saved):
    tree = trie(sequences, min_saved)[2].tree
    for node in set(tree.parents) - {-1}:
        num_branches = tree.parents.count(node)
        ends_here = 1  # a sequence that ends at the fork is a branch without tokens
        assert tree.lengths[node] * (num_branches - 1 + ends_here) >= min_saved


@given(SEQUENCES, st.integers(0, 3), st.data())
def test_shared_tokens_have_the_same_experts_and_the_same_followers(sequences, look_ahead, data):
    tokens = [np.array(each, np.int32) for each in sequences]
    routing = [
        None if known is None else np.array(data.draw(st.lists(st.integers(0, 1), min_size=known, max_size=known)), np.uint8)[:, None, None]
        for known in (data.draw(st.none() | st.integers(0, len(each))) for each in sequences)
    ]
    found = find_shared_prefixes(tokens, routing=routing, look_ahead=look_ahead, min_saved=1)

    def followed(i: int, t: int) -> tuple[list[int], object]:
        """Return a token, the tokens that follow it, and its expert."""
        experts = routing[i]
        known = experts is not None and t < len(experts)
        return sequences[i][: t + 1 + look_ahead], int(experts[t, 0, 0]) if experts is not None and known else None

    for before, i, shared in zip(found.order, found.order[1:], found.shared[1:]):
        alike = 0
        while alike + look_ahead < min(len(sequences[before]), len(sequences[i])) and followed(before, alike) == followed(i, alike):
            alike += 1
        assert shared == alike


@given(SEQUENCES, st.integers(1, 7))
def test_a_tree_cut_at_pieces_of_its_row_is_the_same_tree(sequences, piece):
    tree = trie(sequences)[2].tree
    padded = tree.with_padding(-(-tree.num_tokens // piece) * piece)
    cut = padded.cut(piece)
    assert all(start // piece == (end - 1) // piece for start, end in pairwise(cut.starts))
    assert (cut.depths == padded.depths).all() and (seen(cut) == seen(padded)).all()
    own = slice(tree.num_tokens)
    assert (seen(padded)[own, own] == seen(tree)).all() and (padded.depths[own] == tree.depths).all()


def test_sequences_that_extend_one_another_are_one_node():
    tree = trie([[1, 2, 0, 1, 1, 2], [1, 2], [1, 2, 0, 1]])[2].tree
    assert (tree.starts, tree.parents) == ((0, 6), (-1,))


def seen(tree):
    """Return [T, T] True where the row's token attends to the column's, by the paths of the nodes."""
    visible = np.zeros((tree.num_tokens,) * 2, bool)
    for node, (start, end) in enumerate(pairwise(tree.starts)):
        path = tree.path_tokens[tree.path_starts[node] : tree.path_starts[node + 1]]
        for token in range(start, end):
            visible[token, path[: len(path) - (end - 1 - token)]] = True
    return visible


@given(SEQUENCES)
def test_a_token_sees_only_its_own_prefix(sequences):
    layout = trie(sequences)[2]
    visible = np.zeros((layout.tree.num_tokens,) * 2, bool)
    for slots in layout.slots:
        for t, slot in enumerate(slots):
            visible[slot, slots[: t + 1]] = True
    assert (seen(layout.tree) == visible).all()


H, HKV, D = 4, 2, 8


def by_definition(query, key, value, slots, *, scale, window, sinks):
    """Compute attention token by token over the slots of each sample."""
    out = [torch.empty(0)] * len(query)
    for own in slots:
        for t, slot in enumerate(own):
            seen = torch.from_numpy(own[0 if window is None else max(0, t - window + 1) : t + 1])
            scores = torch.stack([key[seen, h * HKV // H] @ query[slot, h] * scale for h in range(H)])
            weights = (scores if sinks is None else torch.cat([sinks[:, None], scores], 1)).softmax(1)[:, -len(seen) :]
            out[slot] = torch.stack([weights[h] @ value[seen, h * HKV // H] for h in range(H)])
    return torch.stack(out)


@settings(max_examples=15, deadline=None)
@given(SEQUENCES, st.none() | st.integers(1, 8), st.integers(0, 9), st.booleans())
def test_tree_attention_and_its_gradients_are_those_of_each_sequence(sequences, window, seed, has_sinks):
    gen = torch.Generator().manual_seed(seed)
    layout = trie(sequences)[2]
    tree = layout.tree
    q, k, v = (torch.randn(tree.num_tokens, heads, D, generator=gen, dtype=torch.float64, requires_grad=True) for heads in (H, HKV, HKV))
    sinks = torch.randn(H, generator=gen, dtype=torch.float64, requires_grad=True) if has_sinks else None
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    want = by_definition(q, k, v, layout.slots, scale=0.3, window=window, sinks=sinks)
    upstream = torch.randn(want.shape, generator=gen, dtype=torch.float64)
    wanted = torch.autograd.grad(want, inputs, upstream)
    got = tree_attention(q, k, v, tree, scale=0.3, window=window, sinks=sinks)
    torch.testing.assert_close(got, want)
    own = tuple(range(0, len(tree.lengths), 2))
    rows = torch.cat([torch.arange(tree.starts[node], tree.starts[node + 1]) for node in own])
    part = tree_attention(q[rows], k, v, tree, scale=0.3, window=window, sinks=sinks, nodes=own)
    torch.testing.assert_close(part, want[rows])
    for mine, reference in zip(torch.autograd.grad(got, inputs, upstream), wanted):
        torch.testing.assert_close(mine, reference)


def test_gradients_of_rows_taken_often_are_added_in_float32():
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.tensor([0] * 1024 + [1])
    take_rows(x, rows).sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [1024.0, 1.0]  # bfloat16 stops at 256


FLOPS = sequence_flops(linear=1000.0, attention=4.0)


@given(SEQUENCES, st.integers(1, 4), st.integers(1, 3), st.none() | st.integers(1, 40), st.none() | st.integers(1, 5), st.booleans())
def test_packing_keeps_its_limits_with_shared_tokens_counted_once(sequences, num_ranks, multiple_of, max_tokens, max_samples, balance):
    prefixes = trie(sequences)[0]
    lengths = [len(tokens) for tokens in sequences]
    ranks = pack(
        lengths,
        Capacity(max_tokens, max_samples),
        num_ranks=num_ranks,
        multiple_of=multiple_of,
        balance_by=FLOPS if balance else None,
        prefixes=prefixes,
    )
    assert len(ranks) == num_ranks
    (num_plans,) = {len(plans) for plans in ranks}
    assert num_plans % multiple_of == 0
    plans = [plan for rank in ranks for plan in rank]
    assert sorted(i for plan in plans if plan.counts for i in plan.samples) == list(range(len(lengths)))
    for plan in plans:
        own = [sequences[i] for i in plan.samples]
        shared = plan.shared or (0,) * len(own)
        assert all(tokens[:n] == before[:n] for tokens, n, before in zip(own, shared, [[], *own]))
        num_tokens = lay_out([len(tokens) for tokens in own], shared).tree.num_tokens
        assert max_tokens is None or len(own) == 1 or num_tokens <= max_tokens
        assert max_samples is None or len(own) <= max_samples
    assert sum(any(plan.counts for plan in rank) for rank in ranks) == min(num_ranks, len(lengths))


def test_a_tree_that_is_too_long_for_a_row_is_cut_into_rows_that_each_hold_its_prefix():
    group = [[7] * 100 + [branch] * 20 for branch in range(6)]
    found = find_shared_prefixes([np.array(tokens) for tokens in group])
    (plans,) = pack([120] * 6, Capacity(max_tokens=160), prefixes=found)
    assert [plan.shared for plan in plans] == [(0, 100, 100)] * 2
