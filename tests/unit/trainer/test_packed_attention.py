"""Packed attention against the definition: softmax over the keys that each token may see, one sequence at a time."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.models.attention import packed_attention

H, HKV, D = 4, 2, 8


def by_definition(query, key, value, cu_seqlens, *, scale, window, sinks):
    outputs = []
    for start, end in pairwise(cu_seqlens):
        for t in range(start, end):
            first = start if window is None else max(start, t - window + 1)
            heads = []
            for h in range(query.size(1)):
                g = h * key.size(1) // query.size(1)
                scores = key[first : t + 1, g] @ query[t, h] * scale
                with_sink = scores if sinks is None else torch.cat([sinks[h, None], scores])
                heads.append(with_sink.softmax(0)[-len(scores) :] @ value[first : t + 1, g])
            outputs.append(torch.stack(heads))
    return torch.stack(outputs)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 10),
    seed=st.integers(0, 9),
    has_sinks=st.booleans(),
)
def test_every_token_sees_exactly_its_own_sequence_up_to_itself(lengths, window, seed, has_sinks):
    gen = torch.Generator().manual_seed(seed)
    cu_seqlens = [0, *accumulate(lengths)]
    q, k, v = (torch.randn(cu_seqlens[-1], heads, D, generator=gen, dtype=torch.float64, requires_grad=True) for heads in (H, HKV, HKV))
    sinks = torch.randn(H, generator=gen, dtype=torch.float64, requires_grad=True) if has_sinks else None
    got = packed_attention(q, k, v, cu_seqlens, scale=0.3, window=window, sinks=sinks)
    want = by_definition(q, k, v, cu_seqlens, scale=0.3, window=window, sinks=sinks)
    torch.testing.assert_close(got, want)
    upstream = torch.randn(got.shape, generator=gen, dtype=torch.float64)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    for mine, reference in zip(torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream)):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("lengths", [[5] * 7, [3, 3, 4, 4, 4, 6]])
def test_equal_neighbors_share_one_kernel_call(lengths, monkeypatch):
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(a[0].shape) or sdpa(*a, **k))
    total = sum(lengths)
    packed_attention(torch.randn(total, H, D), torch.randn(total, HKV, D), torch.randn(total, HKV, D), [0, *accumulate(lengths)], scale=1.0)
    assert [shape[0] * shape[2] for shape in calls] == [lengths.count(length) * length for length in dict.fromkeys(lengths)]


@pytest.mark.parametrize("value_dim", [D, 12])
def test_sinks_without_a_kernel_are_those_of_the_kernel(value_dim):
    """There is no kernel for values whose width differs from that of the keys, nor for float32 on CUDA."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(11, heads, width, generator=gen) for heads, width in ((H, D), (HKV, D), (HKV, value_dim)))
    sinks = torch.randn(H, generator=gen)
    given = {"scale": 0.3, "window": 4, "sinks": sinks}
    torch.testing.assert_close(packed_attention(q, k, v, [0, 4, 11], **given), by_definition(q, k, v, [0, 4, 11], **given))
