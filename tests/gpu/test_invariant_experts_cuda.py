"""Batch-invariant experts: a token has the same bits in every call, and values and gradients are those of ordinary operations."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fuligo.models.batch_invariant import linear
from fuligo.models.gpu_invariant import experts, route

expert_kernels = pytest.importorskip("fuligo.models.invariant_expert_kernels", exc_type=ImportError)
kernels = pytest.importorskip("fuligo.models.invariant_kernels", exc_type=ImportError)
CUDA = torch.device("cuda")
PARTS = (1, 2, 7, 64, 65, 200, 512, 513, 700, 2200)
"""Tokens of calls that compute a part of the tokens of a larger one."""
SIZES = [(128, 8, 2048, 768), (8, 2, 256, 128), (60, 4, 1000, 136)]
"""Experts, experts of a token, width of a token and of an expert: Qwen3-30B-A3B's; few large groups; sizes that fill no tile."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=CUDA).mul_(scale).bfloat16()


class Mixture:
    """Random experts and the router of 3,000 tokens; the last expert is chosen by none, the first by most."""

    def __init__(self, num_experts: int, top_k: int, size: int, inner: int, num_tokens: int = 3000) -> None:
        self.x, self.logits = random(num_tokens, size), random(num_tokens, num_experts)
        self.logits[:, 0] += 2.0
        self.logits[:, -1] = -20.0
        self.gate_up, self.down = (
            random(num_experts, 2 * inner, size, scale=size**-0.5),
            random(num_experts, size, inner, scale=inner**-0.5),
        )
        self.top_k = top_k

    def forward(self, tokens: slice, *, ranks: int = 1) -> Tensor:
        weights, chosen = route(self.logits[tokens], self.top_k, renormalize=True)
        return experts(self.x[tokens], self.gate_up, self.down, weights, chosen, ranks=ranks)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_token_does_not_depend_on_other_tokens(sizes: tuple[int, int, int, int]) -> None:
    mixture = Mixture(*sizes)
    whole = mixture.forward(slice(0, 3000))
    for size in PARTS:
        start = (3000 - size) // 3
        part = slice(start, start + size)
        assert torch.equal(mixture.forward(part), whole[part]), f"{size} tokens"


def test_a_row_has_the_same_bits_in_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture(128, 8, 2048, 768)
    whole = mixture.forward(slice(0, 3000))
    for tile in {expert_kernels._tile(rows) for rows in (1, 100, 1000)}:
        monkeypatch.setattr(expert_kernels, "_tile", lambda _, tile=tile: tile)
        assert torch.equal(mixture.forward(slice(0, 3000)), whole), tile


@pytest.mark.parametrize("sizes", SIZES)
def test_values_are_those_of_ordinary_operations(sizes: tuple[int, int, int, int]) -> None:
    mixture = Mixture(*sizes, num_tokens=300)
    found = mixture.forward(slice(0, 300))
    _, numbers = route(mixture.logits, mixture.top_k, renormalize=True)  # torch may take others of equal ones
    shares = mixture.logits.float().softmax(-1).gather(1, numbers.long())
    shares = shares / shares.sum(-1, keepdim=True)
    wanted = torch.zeros(300, mixture.x.size(1), device=CUDA)
    for number in range(len(mixture.gate_up)):
        tokens, places = torch.where(numbers == number)
        gate, up = (mixture.x[tokens].float() @ mixture.gate_up[number].float().t()).chunk(2, -1)
        out = (F.silu(gate) * up) @ mixture.down[number].float().t()
        wanted.index_add_(0, tokens, out * shares[tokens, places, None])
    assert (found.float() - wanted).norm() < 1e-2 * wanted.norm()


def test_the_router_takes_the_first_of_equal_experts() -> None:
    logits = random(1000, 128)
    logits = (logits * 2).round() / 2  # many are equal
    weights, chosen = route(logits, 8, renormalize=False)
    shares, numbers = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(chosen, numbers[:, :8].int())
    torch.testing.assert_close(weights, shares[:, :8], rtol=1e-2, atol=1e-6)
    for size in PARTS[:-1]:
        assert torch.equal(route(logits[:size], 8, renormalize=False)[0], weights[:size])


def test_both_ways_to_sort_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    _, chosen = route(random(700, 60), 4, renormalize=True)
    counted = expert_kernels.sort_by_expert(chosen, 60)
    monkeypatch.setattr(expert_kernels, "MOST_COUNTED", 0)
    for one, other in zip(counted, expert_kernels.sort_by_expert(chosen, 60), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_float64(ranks: int) -> None:
    mixture = Mixture(8, 2, 256, 128, num_tokens=500)
    inputs = [each.requires_grad_() for each in (mixture.x, mixture.gate_up, mixture.down, mixture.logits)]
    seen = random(500, 256)
    own = torch.autograd.grad((mixture.forward(slice(0, 500), ranks=ranks) * seen).sum(), inputs)
    _, numbers = route(mixture.logits, 2, renormalize=True)
    x, gate_up, down, logits = (each.detach().double().requires_grad_() for each in inputs)
    shares = logits.softmax(-1).gather(1, numbers.long())
    shares = shares / shares.sum(-1, keepdim=True)
    total = torch.zeros(500, 256, dtype=torch.float64, device=CUDA)
    for number in range(8):
        tokens, places = torch.where(numbers == number)
        gate, up = (x[tokens] @ gate_up[number].t()).chunk(2, -1)
        total = total.index_add(0, tokens, ((F.silu(gate) * up) @ down[number].t()) * shares[tokens, places, None])
    wanted = torch.autograd.grad((total * seen.double()).sum(), (x, gate_up, down, logits))
    for name, found, expected in zip(("x", "gate_up", "down", "logits"), own, wanted, strict=True):
        assert (found.double() - expected).norm() < 2e-2 * expected.norm(), name
    assert not own[1][-1].any() and not own[2][-1].any(), "an expert without tokens"


def test_cuda_graphs_hold_any_routing() -> None:
    """An engine captures a graph once and decodes other tokens with it."""
    mixture = Mixture(128, 8, 2048, 768)
    tokens = slice(0, 64)
    x, logits = mixture.x[tokens].clone(), mixture.logits[tokens].clone()

    def forward() -> Tensor:
        weights, chosen = expert_kernels.route(logits, 8, renormalize=True)
        return expert_kernels.experts(x, mixture.gate_up, mixture.down, weights, chosen, swiglu=kernels.swiglu).out

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for start in (0, 64, 1000):
        part = slice(start, start + 64)
        x.copy_(mixture.x[part])
        logits.copy_(mixture.logits[part])
        graph.replay()
        assert torch.equal(out, mixture.forward(part))


def test_experts_of_two_ranks_add_up_to_the_trainers() -> None:
    mixture = Mixture(128, 8, 2048, 768, num_tokens=400)
    weights, chosen = route(mixture.logits, 8, renormalize=True)
    gate, up = mixture.gate_up.chunk(2, 1)
    parts = [
        experts(
            mixture.x,
            torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1),
            mixture.down.chunk(2, 2)[rank].contiguous(),
            weights,
            chosen,
        )
        for rank in range(2)
    ]
    assert torch.equal(parts[0] + parts[1], mixture.forward(slice(0, 400), ranks=2))


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 1536), (4096, 2560), (9728, 2560), (208, 130)])
def test_products_of_two_ranks_add_up_to_the_trainers(num_inputs: int, num_outputs: int) -> None:
    weight, bias = random(num_outputs, num_inputs), random(num_outputs)
    for num_rows in (1, 64, 300, 1000, 3000):
        x = random(num_rows, num_inputs)
        whole = linear(x, weight, bias, dtype=torch.bfloat16, ranks=2)
        (x_0, x_1), (weight_0, weight_1) = ([part.contiguous() for part in each.chunk(2, 1)] for each in (x, weight))
        first = kernels.linear(x_0, weight_0, bias, torch.bfloat16)
        assert torch.equal(first + kernels.linear(x_1, weight_1, None, torch.bfloat16), whole)
    wanted = x.double() @ weight.double().t() + bias.double()
    assert (whole.double() - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize(("heads", "key_heads"), [(32, 8), (14, 2), (8, 1)])
def test_attention_of_a_head_is_the_same_on_two_ranks(heads: int, key_heads: int) -> None:
    """Each rank has half of the key heads, or a copy of the only one."""
    query, key, value = random(300, heads, 128), random(300, key_heads, 128), random(300, key_heads, 128)
    starts, slots = torch.tensor([0, 100, 300], dtype=torch.int32, device=CUDA), torch.arange(300, device=CUDA)

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (each.contiguous() for each in inputs)
        out = torch.empty_like(query)
        kernels.attention(query, key, value, starts, starts, slots, longest=200, scale=0.1, out=out)
        return out

    whole = attend(query, key, value)
    for rank in range(2):
        own = [each if each.size(1) == 1 else each.chunk(2, 1)[rank] for each in (key, value)]
        assert torch.equal(attend(query.chunk(2, 1)[rank], *own), whole.chunk(2, 1)[rank])
