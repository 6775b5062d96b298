"""Batch-invariant operations: equal bits for any neighbors, and values near those of ordinary operations in float64."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuligo.models import batch_invariant, invariant_modules
from fuligo.models.attention import packed_attention
from fuligo.models.batch_invariant import attention, causal_attention, linear, log_softmax, rms_norm, round_rows, round_weight, silu
from fuligo.models.invariant_modules import InvariantExperts, InvariantModel, route_tokens
from tests import tiny

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def require_same_rows(compute: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Check that rows have the same result by themselves, in any slice, in another order and among others."""
    whole = compute(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    assert torch.equal(compute(rows[order]), whole[order])
    assert torch.equal(compute(torch.cat([-rows[:5], rows]))[5:], whole)
    for start, end in [(0, 1), (1, 4), (3, 20), (len(rows) - 1, len(rows)), (7, len(rows))]:
        assert torch.equal(compute(rows[start:end].clone()), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 33), (1024, 257), (1537, 16)])
@pytest.mark.usefixtures("threads")
def test_linear_depends_only_on_the_row(monkeypatch: pytest.MonkeyPatch, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    x, weight = heavy_tailed(70, num_inputs).to(dtype), heavy_tailed(num_outputs, num_inputs, seed=2).to(dtype)
    bias = heavy_tailed(num_outputs, seed=3).to(dtype)
    require_same_rows(lambda rows: linear(rows, weight, bias, dtype=dtype), x)
    want = linear(x, weight, bias, dtype=dtype)
    assert torch.equal(linear(x, weight, bias, rounded=round_weight(weight), dtype=dtype), want)
    assert torch.equal(linear(x, weight.t().contiguous().t(), bias, dtype=dtype), want)
    monkeypatch.setattr(batch_invariant, "MAX_ELEMENTS", 5 * num_inputs)
    assert torch.equal(linear(x, weight, bias, dtype=dtype), want)


def test_linear_sums_in_any_order() -> None:
    """The result does not change with the order of the inputs, which no library can guarantee for sums that round."""
    x, weight = heavy_tailed(9, 500), heavy_tailed(40, 500, seed=1)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x[:, order], weight[:, order], None, dtype=torch.float32), linear(x, weight, None, dtype=torch.float32))
    assert not torch.equal(F.linear(x[:, order], weight[:, order]), F.linear(x, weight))
    # All terms near the largest that their units allow: their sum needs all bits of a float64.
    x, weight = (2.0 - 0.02 * torch.rand(9, 512, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    order = torch.randperm(512, generator=torch.Generator().manual_seed(3))
    largest = linear(x, weight, None, dtype=torch.float64)
    assert torch.equal(linear(x[:, order], weight[:, order], None, dtype=torch.float64), largest)


@pytest.mark.parametrize("width", [100, 1000, 40_001])
def test_norm_and_softmax_sum_in_any_order(width: int) -> None:
    x, weight = heavy_tailed(20, width), heavy_tailed(width, seed=1)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rms_norm(x[:, order], weight[order], 1e-6), rms_norm(x, weight, 1e-6)[:, order])
    flat = 0.1 * x  # so that many terms matter
    assert torch.equal(log_softmax(flat[:, order]), log_softmax(flat)[:, order])


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.integers(15, 26))
def test_rounded_rows_are_few_units(values: list[float], bits: int) -> None:
    x = torch.tensor([values])
    rounded = round_rows(x, bits)
    largest = x.abs().max().double().item()
    assert (rounded - x).abs().max().item() <= 2.0**-bits * largest
    if largest:
        unit = 2.0 ** (torch.tensor(largest).frexp().exponent.item() - 1 - bits)  # at most largest / 2 ** bits
        assert torch.equal((rounded / unit).round() * unit, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 100, 1024])
@pytest.mark.usefixtures("threads")
def test_norm_and_activation_depend_only_on_the_row(width: int, dtype: torch.dtype) -> None:
    x, weight = heavy_tailed(90, width).to(dtype), heavy_tailed(width, seed=1).to(dtype)
    require_same_rows(lambda rows: rms_norm(rows, weight, 1e-6), x)
    require_same_rows(silu, x)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 0.02, "atol": 1e-3}
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (width,), weight, 1e-6), **tolerance)
    torch.testing.assert_close(silu(x), F.silu(x), **tolerance)


@pytest.mark.parametrize("vocab_size", [303, 70_001])
@pytest.mark.usefixtures("threads")
def test_log_softmax_depends_only_on_the_row(vocab_size: int) -> None:
    logits = 5 * heavy_tailed(24, vocab_size)
    require_same_rows(log_softmax, logits)
    torch.testing.assert_close(log_softmax(logits), logits.double().log_softmax(-1).float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 64, 4097, 70_003])
@pytest.mark.usefixtures("threads")
def test_exp_and_log_take_one_path_for_all_elements(length: int) -> None:
    """The only functions of torch that are not defined by IEEE 754 and are used as they are; so are cos and sin, by rotary embeddings."""
    x = heavy_tailed(70_011).abs() + 0.1
    for function in (torch.exp, torch.log, torch.cos, torch.sin):
        whole = function(x)
        for start in (0, 1, 7):
            assert torch.equal(function(x[start : start + length]), whole[start : start + length]), function.__name__
            assert torch.equal(function(x[start : start + length].clone()), whole[start : start + length]), function.__name__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("threads")
def test_attention_is_the_same_packed_and_token_by_token(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Whole sequences in packed rows equal one query at a time over a cache with stale entries; blocks of keys are crossed."""
    lengths, heads, key_heads, size = [3, 3, 1, 540, 40], 4, 2, 16
    total = sum(lengths)
    cu_seqlens = [0, 3, 6, 7, 547, 587]
    q, k, v = (heavy_tailed(total, n, size, seed=n + i).to(dtype) for i, n in enumerate((heads, key_heads, key_heads)))
    packed = causal_attention(q, k, v, cu_seqlens, scale=0.25)
    tolerance = {"rtol": 1e-4, "atol": 2e-4} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(packed, packed_attention(q, k, v, cu_seqlens, scale=0.25), **tolerance)
    for start, end in pairwise(cu_seqlens):
        assert torch.equal(causal_attention(q[start:end], k[start:end], v[start:end], [0, end - start], scale=0.25), packed[start:end])
    caches = [heavy_tailed(2, 1024, key_heads, size, seed=9).to(dtype) for _ in range(2)]
    for cache, new in zip(caches, (k, v)):
        cache[0, :540], cache[1, :40] = new[7:547], new[547:]
    for position in (0, 1, 20, 39):
        queries = torch.stack([q[7 + position + 500], q[547 + position]])[:, None]
        at = torch.tensor([[position + 500], [position]])
        hidden = torch.arange(600)[None, None] > at[..., None]
        out = attention(queries, caches[0][:, :600], caches[1][:, :600], hidden=hidden, scale=0.25)
        assert torch.equal(out[:, 0], torch.stack([packed[7 + position + 500], packed[547 + position]]))
    monkeypatch.setattr(batch_invariant, "MAX_ELEMENTS", 10_000)  # some queries of a sequence, one sequence of a batch
    assert torch.equal(causal_attention(q, k, v, cu_seqlens, scale=0.25), packed)
    assert torch.equal(attention(queries, caches[0][:, :600], caches[1][:, :600], hidden=hidden, scale=0.25), out)


def test_attention_sums_keys_of_a_block_in_any_order() -> None:
    """Weights and values near the largest that their units allow: the sum of 512 products then needs all bits of a float64."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.ones(1, 1, 1, 1), torch.rand(1, 1024, 1, 1, generator=generator) * -0.01
    key[:, 0] = 0.0  # the largest weight is in the first block
    value = 0.02 * torch.rand(1, 1024, 1, 8, generator=generator) - 2.0
    order = torch.cat([torch.arange(512), 512 + torch.randperm(512, generator=generator)])
    out = attention(query, key, value, hidden=None, scale=1.0, dtype=torch.float64)
    assert torch.equal(attention(query, key[:, order], value[:, order], hidden=None, scale=1.0, dtype=torch.float64), out)


def test_gradients_are_those_of_ordinary_operations() -> None:
    x, weight, bias = heavy_tailed(12, 24), heavy_tailed(16, 24, seed=1), heavy_tailed(16, seed=2)
    q, k, v = (heavy_tailed(12, n, 8, seed=3) for n in (4, 2, 2))
    for ours, theirs, inputs in (
        (lambda *given: linear(*given, dtype=torch.float32), F.linear, (x, weight, bias)),
        (lambda *given: rms_norm(*given, 1e-6), lambda a, b: F.rms_norm(a, (24,), b, 1e-6), (x, weight[0])),
        (silu, F.silu, (x,)),
        (
            lambda *given: causal_attention(*given, [0, 5, 12], scale=0.3),
            lambda *given: packed_attention(*given, [0, 5, 12], scale=0.3),
            (q, k, v),
        ),
    ):
        gradients = []
        for function in (ours, theirs):
            leaves = [each.clone().requires_grad_() for each in inputs]
            out = function(*leaves)
            gradients.append(torch.autograd.grad(out, leaves, heavy_tailed(*out.shape, seed=7)))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_values_that_are_not_finite_reach_the_result() -> None:
    x, weight = heavy_tailed(3, 8), heavy_tailed(4, 8)
    x[1, 2] = float("nan")
    x[2, 2] = float("inf")
    assert linear(x, weight, None, dtype=torch.float32).isfinite().all(-1).tolist() == [True, False, False]
    assert log_softmax(x).isfinite().all(-1).tolist() == [True, False, False]


@pytest.mark.parametrize("normed", [True, False])
def test_a_mixture_depends_on_the_token_alone_and_has_the_gradients_of_ordinary_operations(normed: bool) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normed)
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = heavy_tailed(1, 50, 32, seed=1)

    def run() -> tuple[Tensor, list[Tensor]]:
        given = tokens.clone().requires_grad_()
        out = block(given)
        return out.detach(), list(torch.autograd.grad((out * heavy_tailed(*out.shape, seed=2)).sum(), [given, *block.parameters()]))

    want, wanted = run()
    block.gate.forward, block.experts.forward = partial(route_tokens, block.gate), InvariantExperts(block.experts, keeps_weights=False)
    got, found = run()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for mine, reference in zip(found, wanted, strict=True):
        assert (mine - reference).abs().max() <= 1e-4 * reference.abs().max()
    kept = InvariantExperts(block.experts, keeps_weights=True)
    with torch.no_grad():
        for count in (1, 2, 7):
            assert torch.equal(block(tokens[:, :count]), got[:, :count])
            assert torch.equal(block(tokens[:, -count:]), got[:, -count:])
        block.experts.forward = kept
        assert torch.equal(block(tokens), got) and torch.equal(block(tokens[:, 3:5]), got[:, 3:5])
        block.experts.down_proj.mul_(2.0)
        kept.forget()
        assert torch.equal(block(tokens), 2.0 * got)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_whose_inputs_an_engine_splits_round_as_its_gpus_do(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model = tiny.model(family)
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    seen: dict[str, int] = {}

    def record(x: Tensor, weight: Tensor, *given: object, ranks: int, **options: object) -> Tensor:
        seen[names[id(weight)]] = ranks
        return linear(x, weight, *given, ranks=ranks, **options)

    monkeypatch.setattr(invariant_modules, "linear", record)
    InvariantModel(model, ranks=2)
    model(torch.arange(5)[None])
    assert {name.split(".")[-2] for name, ranks in seen.items() if ranks == 2} == {"o_proj", "down_proj"}
    assert {name.split(".")[-2] for name, ranks in seen.items() if ranks == 1} >= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert len(seen) == 2 * 7 + 1
