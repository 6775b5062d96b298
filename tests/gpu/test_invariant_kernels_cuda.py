"""Batch-invariant kernels: a row has the same bits in every call, and values and gradients are those of ordinary operations."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fuligo.models.attention import packed_attention
from fuligo.models.batch_invariant import causal_attention, linear, rms_norm
from fuligo.models.gpu_invariant import paged_attention, rotate, swiglu
from fuligo.models.token_tree import TokenTree
from fuligo.models.tree_attention import invariant_tree_attention

kernels = pytest.importorskip("fuligo.models.invariant_kernels", exc_type=ImportError)
CUDA = torch.device("cuda")
PARTS = (1, 2, 7, 64, 65, 200, 512, 513, 700)
"""Rows of calls that compute a part of the rows of a larger one."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def assert_rows_alone(compute: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Check that parts of the rows give the bits of the whole call."""
    whole = compute(rows)
    for size in PARTS:
        start = (len(rows) - size) // 3
        assert torch.equal(compute(rows[start : start + size].contiguous()), whole[start : start + size]), f"{size} rows"


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 1536), (2560, 9728), (1000, 130), (9728, 2560)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_a_row_do_not_depend_on_other_rows(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(3000, num_inputs), random(num_outputs, num_inputs), random(num_outputs)
    assert_rows_alone(lambda rows: linear(rows, weight, bias, dtype=dtype), x)
    wanted = x.double() @ weight.double().t() + bias.double()
    relative = (linear(x, weight, bias, dtype=dtype).double() - wanted).abs() / wanted.square().mean().sqrt()
    assert relative.max() < (3e-2 if dtype == torch.bfloat16 else 1e-4)


def test_columns_do_not_depend_on_their_place_in_the_weight() -> None:
    """SGLang computes query, key and value in one product, the trainer in three."""
    x, weight = random(300, 576), random(960, 576)
    parts = [linear(x, part, None, dtype=torch.bfloat16) for part in weight.split([576, 192, 192])]
    assert torch.equal(linear(x, weight, None, dtype=torch.bfloat16), torch.cat(parts, 1))


@pytest.mark.parametrize("size", [64, 128, 576, 2560, 5000])
def test_norm_of_a_row_does_not_depend_on_other_rows(size: int) -> None:
    x, weight = random(3000, size), random(size)
    assert_rows_alone(lambda rows: rms_norm(rows, weight, 1e-6), x)
    wanted = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), wanted, rtol=2e-2, atol=1e-2)


def test_log_of_sums_does_not_depend_on_other_rows() -> None:
    logits = random(1000, 49_152, dtype=torch.float32)
    assert_rows_alone(kernels.log_sum_exp, logits)
    torch.testing.assert_close(kernels.log_sum_exp(logits), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (32, 8, 128), (28, 4, 128), (4, 4, 96)])
def test_attention_of_a_token_is_the_same_in_prefill_chunks_and_decoding(heads: int, key_heads: int, size: int) -> None:
    lengths = [300, 17, 130, 1]
    total = sum(lengths)
    query, key, value = random(total, heads, size), random(total, key_heads, size), random(total, key_heads, size)
    starts = starts_of(lengths)
    scale = size**-0.5
    whole = causal_attention(query, key, value, starts.tolist(), scale=scale)
    expected = packed_attention(query, key, value, starts.tolist(), scale=scale)
    torch.testing.assert_close(whole, expected, rtol=2e-2, atol=2e-2)

    pool = torch.randperm(2 * total, device=CUDA)[:total]  # places of the tokens in an engine's cache
    keys, values = random(2 * total, key_heads, size), random(2 * total, key_heads, size)
    keys[pool], values[pool] = key, value
    for last, cut in itertools.product((1, 16, 40), (0, 5, 100)):  # new tokens of a call, and tokens that come only after it
        kept = [(int(start), length - cut) for start, length in zip(starts, lengths) if length > cut]
        counts = [min(last, length) for _, length in kept]
        rows = torch.cat([torch.arange(start + length - count, start + length) for (start, length), count in zip(kept, counts)]).to(CUDA)
        slots = torch.cat([pool[start : start + length] for start, length in kept])
        key_starts = starts_of([length for _, length in kept])
        found = paged_attention(query[rows], keys, values, starts_of(counts), key_starts, slots, longest=max(counts), scale=scale)
        assert torch.equal(found, whole[rows]), f"{last} new tokens, {cut} after them"


def test_trees_have_the_attention_of_their_sequences() -> None:
    tree = TokenTree((0, 70, 100, 160), (-1, 0, 0))  # a prompt of 70 tokens with answers of 30 and 60
    query, key, value = random(160, 6, 64), random(160, 2, 64), random(160, 2, 64)
    found = invariant_tree_attention(query, key, value, tree, scale=0.125)
    for answer in (range(70, 100), range(100, 160)):
        rows = torch.tensor([*range(70), *answer], device=CUDA)
        alone = causal_attention(query[rows], key[rows], value[rows], (0, len(rows)), scale=0.125)
        assert torch.equal(found[rows], alone)


def test_rotation_is_transformers() -> None:
    heads, size, positions = 5, 64, torch.randint(0, 500, (300,), device=CUDA)
    frequencies = (1.0 / 10_000 ** (torch.arange(0, size, 2).float() / size)).to(CUDA)
    angles = torch.arange(500, device=CUDA).float()[:, None] * frequencies
    x = random(300, heads * size)
    cos, sin = (torch.cat([part, part], -1)[positions].to(x.dtype)[None] for part in (angles.cos(), angles.sin()))
    states = x.view(1, 300, heads, size).transpose(1, 2)
    wanted, _ = apply_rotary_pos_emb(states, states, cos, sin)
    found = kernels.rotate(x.view(300, heads, size), positions, angles.cos(), angles.sin())
    assert torch.equal(found, wanted[0].transpose(0, 1))


def test_activation_of_a_row_does_not_depend_on_other_rows_or_on_its_place() -> None:
    """SGLang has gate and up in one matrix."""
    both = random(3000, 2 * 1536)
    gate, up = (part.contiguous() for part in both.chunk(2, 1))
    assert_rows_alone(lambda rows: kernels.swiglu(*rows.chunk(2, 1)), both)
    assert torch.equal(swiglu(gate, up), kernels.swiglu(*both.chunk(2, 1)))
    torch.testing.assert_close(swiglu(gate, up), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=1e-2)


def test_gradients_of_rotation_and_activation_are_those_of_float64() -> None:
    gate, up, x = (tensor.requires_grad_() for tensor in (random(300, 512), random(300, 512), random(300, 4, 64)))
    angles = torch.rand(300, 32, device=CUDA)
    cos, sin = (torch.cat([part, part], -1).bfloat16() for part in (angles.cos(), angles.sin()))
    own = torch.autograd.grad(swiglu(gate, up).sum() + (rotate(x, cos, sin) ** 2 * x.detach()).sum(), (gate, up, x))
    wide = [tensor.detach().double().requires_grad_() for tensor in (gate, up, x)]
    low, high = wide[2].chunk(2, -1)
    rotated = wide[2] * cos.double()[:, None] + torch.cat([-high, low], -1) * sin.double()[:, None]
    activation = (torch.nn.functional.silu(wide[0]) * wide[1]).sum()
    wanted = torch.autograd.grad(activation + (rotated**2 * x.detach().double()).sum(), wide)
    for found, expected in zip(own, wanted, strict=True):
        assert (found.double() - expected).norm() < 1e-2 * expected.norm()


def test_gradients_are_those_of_ordinary_operations() -> None:
    x, weight, gain = (tensor.requires_grad_() for tensor in (random(500, 256), random(384, 256), random(256)))
    inputs = (x, weight, gain)
    seen = random(500, 384)

    def loss(normed: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        return (product(normed) * seen).sum()

    own = torch.autograd.grad(loss(rms_norm(x, gain, 1e-6), lambda rows: linear(rows, weight, None, dtype=torch.bfloat16)), inputs)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    normed = torch.nn.functional.rms_norm(wide[0], (256,), wide[2], 1e-6)
    wanted = torch.autograd.grad(((normed @ wide[1].t()) * seen.double()).sum(), wide)
    for found, expected in zip(own, wanted, strict=True):
        assert (found.double() - expected).norm() < 1e-2 * expected.norm()
