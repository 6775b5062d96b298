import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.models.sampling import Filter, filtered, inverse_cdf, uniforms


def allowed(probs: list[float], *, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> set[int]:
    """Filter token by token, by definition."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = set()
    before = 0.0
    for rank, token in enumerate(order):
        if (top_k == -1 or rank < top_k) and before < top_p and probs[token] >= min_p * max(probs):
            kept.add(token)
        before += probs[token]
    return kept


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12),
    st.floats(0.05, 1),
    st.sampled_from([-1, 1, 2, 5]),
    # Powers of two, so that a token exactly at the limit is there in floats too.
    st.sampled_from([0, 0.125, 0.5]),
)
def test_filters_keep_what_their_definitions_keep(weights: list[int], top_p: float, top_k: int, min_p: float) -> None:
    probs = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    limit = len(weights) if top_k == -1 else top_k
    cut = Filter(torch.tensor([0]), torch.tensor([[top_p]]), torch.tensor([[limit]]), torch.tensor([[min_p]]))
    kept = filtered(probs, cut)[0]
    wanted = allowed(probs[0].tolist(), top_p=top_p, top_k=top_k, min_p=min_p)
    close_to_the_limit = any(abs(c - top_p) < 1e-6 for c in probs[0].sort(descending=True).values.cumsum(0).tolist())
    if not close_to_the_limit:
        assert set(kept.nonzero()[:, 0].tolist()) == wanted
    assert all(kept[token] == probs[0, token] for token in kept.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocab_size", [3, 255, 256, 257, 1000])
def test_the_inverse_cdf_is_exact(vocab_size: int) -> None:
    """Each token owns an interval of [0, 1) as long as its probability."""
    probs = torch.rand(vocab_size, generator=torch.Generator().manual_seed(1)) ** 4
    probs[::5] = 0
    cdf = probs.double().cumsum(0) / probs.double().sum()
    starts = torch.cat([torch.zeros(1, dtype=torch.float64), cdf[:-1]])
    for token in range(vocab_size):
        if probs[token] == 0:
            continue
        inside = torch.stack([starts[token] + 1e-12, (starts[token] + cdf[token]) / 2, cdf[token] - 1e-12]).clamp(0, 1 - 2**-53)
        assert inverse_cdf(probs.expand(3, -1), inside).tolist() == [token] * 3


def test_the_ends_of_the_uniform_range_give_tokens_that_have_weight() -> None:
    weights = torch.zeros(2, 700)
    weights[:, [3, 300, 650]] = torch.tensor([1e-30, 1.0, 1e-30])
    assert inverse_cdf(weights, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist()[0] == 3
    assert inverse_cdf(weights, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist()[1] in (300, 650)


def test_uniform_numbers_are_uniform_in_seed_and_in_position() -> None:
    for seeds, positions in ((np.arange(4096), np.zeros(4096)), (np.zeros(4096), np.arange(4096))):
        numbers = np.sort(uniforms(seeds.astype(np.uint64), positions.astype(np.int64)))
        distance = np.abs(numbers - (np.arange(4096) + 0.5) / 4096).max()
        assert distance < 0.031  # Kolmogorov-Smirnov at 0.1%
        assert len(np.unique(numbers)) == 4096
