"""Sparse attention over packed rows against explicit scores and masks of whole sequences."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from fuligo.trainer.megatron_backend import sparse_attention
from fuligo.trainer.megatron_backend.sparse_attention import attend, choose_tokens, row_places

LENGTHS = (8, 4, 20, 12, 36)
"""Sequence lengths, each a multiple of 2 * cp."""
CU_SEQLENS = tuple(accumulate(LENGTHS, initial=0))
NUM_TOKENS = CU_SEQLENS[-1]
TOP_K = 7


def chosen_mask(queries: Tensor, head_weights: Tensor, keys: Tensor, top_k: int) -> Tensor:
    """Return [T, T], True if the row's token attends to the column's."""
    mask = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for start, end in pairwise(CU_SEQLENS):
        for row in range(start, end):
            scores = (head_weights[row, :, None] * (queries[row] @ keys[start : row + 1].T).relu()).sum(0)
            mask[row, start + scores.argsort(descending=True)[:top_k]] = True
    return mask


def as_mask(chosen: Tensor) -> Tensor:
    """Convert [n, K] indices to an [n, T] mask; each token is chosen once."""
    counts = torch.zeros(len(chosen), NUM_TOKENS + 1, dtype=torch.int64).scatter_add_(
        1, torch.where(chosen < 0, NUM_TOKENS, chosen).long(), torch.ones_like(chosen, dtype=torch.int64)
    )
    assert counts[:, :-1].max() == 1
    return counts[:, :-1].bool()


@pytest.fixture(params=[None, 2**12], ids=["one chunk", "small chunks"], autouse=True)
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(sparse_attention, "_CHUNK_BYTES", request.param)


@pytest.mark.parametrize("top_k", [1, TOP_K, 50])
@pytest.mark.parametrize("cp", [1, 2])
def test_the_highest_scores_of_the_tokens_before_are_chosen(cp: int, top_k: int) -> None:
    torch.manual_seed(0)
    queries, head_weights, keys = torch.randn(NUM_TOKENS, 8, 16), torch.randn(NUM_TOKENS, 8), torch.randn(NUM_TOKENS, 16)
    expected = chosen_mask(queries, head_weights, keys, top_k)
    for rank in range(cp):
        places = row_places(CU_SEQLENS, cp, rank)
        mine = places.rows
        chosen = choose_tokens(queries[mine], head_weights[mine], keys, places, top_k)
        assert chosen.shape == (NUM_TOKENS // cp, min(top_k, max(LENGTHS)))
        assert torch.equal(as_mask(chosen), expected[mine])


def test_a_part_of_the_tokens_makes_the_same_choice() -> None:
    """Tensor-parallel ranks choose only for their part of the tokens; parts begin and end within sequences."""
    torch.manual_seed(0)
    queries, head_weights, keys = torch.randn(NUM_TOKENS, 8, 16), torch.randn(NUM_TOKENS, 8), torch.randn(NUM_TOKENS, 16)
    places = row_places(CU_SEQLENS, 1, 0)
    parts = [choose_tokens(queries[s:e], head_weights[s:e], keys, places.slice(s, e), TOP_K) for s, e in ((0, 5), (5, 41), (41, 80))]
    assert torch.equal(as_mask(torch.cat(parts)), chosen_mask(queries, head_weights, keys, TOP_K))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_ranks_have_all_tokens_of_the_row_between_them(cp: int) -> None:
    lengths = [2 * cp * n for n in (3, 1, 5)]
    ranks = [row_places(tuple(accumulate(lengths, initial=0)), cp, rank) for rank in range(cp)]
    rows = torch.cat([places.rows for places in ranks])
    assert torch.equal(rows[ranks[0].in_order], torch.arange(sum(lengths)))
    assert torch.equal(torch.cat([places.positions for places in ranks])[ranks[0].in_order], torch.cat([*map(torch.arange, lengths)]))
    assert {places.longest for places in ranks} == {max(lengths)}


def test_output_and_gradients_are_those_of_masked_attention() -> None:
    torch.manual_seed(0)
    value_size, scale = 10, 0.4
    index = torch.randn(NUM_TOKENS, 8, 16), torch.randn(NUM_TOKENS, 8), torch.randn(NUM_TOKENS, 16)
    queries, latents = torch.randn(NUM_TOKENS, 3, 14, requires_grad=True), torch.randn(NUM_TOKENS, 14, requires_grad=True)
    weight = torch.randn(NUM_TOKENS, 3, value_size)
    scores = torch.einsum("ihw,jw->ihj", queries, latents).masked_fill(~chosen_mask(*index, TOP_K)[:, None], -torch.inf)
    expected = (scale * scores).softmax(-1) @ latents[:, :value_size]
    wanted = torch.autograd.grad((expected * weight).sum(), (queries, latents))

    chosen = choose_tokens(*index, row_places(CU_SEQLENS, 1, 0), TOP_K)
    output = attend(queries, latents, chosen, value_size=value_size, scale=scale)
    got = torch.autograd.grad((output * weight).sum(), (queries, latents))
    for ours, theirs in zip((output, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)
