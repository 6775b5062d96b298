"""Run the batch-invariant kernels in Triton's interpreter, without a GPU, and compare them with torch; exit with an error if they differ.

For an interpreter with triton and a CPU build of torch, such as SGLang's. In float16: the interpreter does not know bfloat16.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import sitecustomize
import torch

sitecustomize.interpret_kernels()
MODELS = Path(__file__).parents[2] / "fuligo" / "models"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kernels, expert_kernels = load("invariant_kernels"), load("invariant_expert_kernels")
kernels._num_processors = lambda device: 7  # programs of the linear kernel, each of which computes several tiles
torch.manual_seed(0)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def check_products() -> None:
    x, weight, bias = half(70, 96), half(130, 96), half(130)
    wanted = x.float() @ weight.float().t() + bias.float()
    for rows in (70, 3):  # in tiles of other sizes
        torch.testing.assert_close(kernels.linear(x[:rows], weight, bias, torch.float32), wanted[:rows], rtol=1e-4, atol=1e-4)


def check_norm_and_sums() -> None:
    x, weight = half(70, 96), half(96)
    found, inverse_rms = kernels.rms_norm(x, weight, 1e-6)
    wanted = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(inverse_rms, wanted)
    torch.testing.assert_close(found, (x * wanted).half() * weight, rtol=2e-3, atol=2e-3)
    logits = torch.randn(5, 9000)
    torch.testing.assert_close(kernels.log_sum_exp(logits), logits.logsumexp(-1))


def check_attention() -> None:
    """Whole sequence, single tokens and chunks after a prefix, in one call over a pool in random order."""
    heads, key_heads, size, lengths, counts = 6, 2, 48, [70, 5, 33], [70, 1, 10]
    slots = torch.randperm(400)[: sum(lengths)].int()
    keys, values, query = half(400, key_heads, size), half(400, key_heads, size), half(sum(counts), heads, size)
    key_starts, query_starts = (torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) for each in (lengths, counts))
    out = torch.empty_like(query)
    kernels.attention(query, keys, values, query_starts, key_starts, slots, longest=70, scale=size**-0.5, out=out)
    for place, (length, count) in enumerate(zip(lengths, counts)):
        places = slots[key_starts[place] : key_starts[place + 1]].long()
        k, v = (each[places].float().repeat_interleave(heads // key_heads, 1) for each in (keys, values))
        rows = slice(int(query_starts[place]), int(query_starts[place + 1]))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), k) * size**-0.5
        hidden = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
        wanted = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        torch.testing.assert_close(out[rows].float(), wanted, rtol=3e-3, atol=3e-3)


def check_rotation_and_activation() -> None:
    angles = torch.arange(20).float()[:, None] / 10_000 ** (torch.arange(0, 24, 2).float() / 24)
    positions, x = torch.randint(0, 20, (7,)), half(7, 4, 24)
    cos, sin = (torch.cat([each, each], -1)[positions].half()[:, None] for each in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., 12:], x[..., :12]], -1)
    found = kernels.rotate(x, positions, angles.cos(), angles.sin())
    assert torch.equal(found, x * cos + turned * sin), "transformers' roundings"
    back = kernels.rotate(found, positions, angles.cos(), angles.sin(), backward=True)
    torch.testing.assert_close(back, x, rtol=5e-3, atol=5e-3)

    gate, up, grad = (half(7, 1500) for _ in range(3))
    torch.testing.assert_close(kernels.swiglu(gate, up), torch.nn.functional.silu(gate) * up, rtol=3e-3, atol=3e-3)
    wide = [each.double().requires_grad_() for each in (gate, up)]
    wanted = torch.autograd.grad((torch.nn.functional.silu(wide[0]) * wide[1] * grad.double()).sum(), wide)
    for found, expected in zip(kernels.swiglu_backward(gate, up, grad), wanted):
        torch.testing.assert_close(found.double(), expected, rtol=3e-3, atol=3e-3)


def check_routing() -> None:
    logits = half(9, 12)
    logits[3, 2:7] = logits[3].amax() + 1  # equal ones
    for renormalize in (True, False):
        weights, chosen = expert_kernels.route(logits, 3, renormalize=renormalize)
        shares = logits.float().softmax(-1)
        wanted, numbers = shares.sort(descending=True, stable=True)
        assert torch.equal(chosen, numbers[:, :3].int()) and chosen[3].tolist() == [2, 3, 4]
        total = wanted[:, :3].sum(-1, keepdim=True) if renormalize else 1.0
        torch.testing.assert_close(weights, (wanted[:, :3] / total).half().float(), rtol=1e-3, atol=1e-6)


def check_sorting() -> None:
    chosen = torch.stack([torch.randperm(11)[:3] for _ in range(90)]).int()
    chosen[chosen == 4] = 10  # an expert without tokens
    for most in (0, 1000):  # sorted by torch, and by the kernel
        expert_kernels.MOST_COUNTED = most
        rows = expert_kernels.sort_by_expert(chosen, 11)
        numbers, order = chosen.flatten().sort(stable=True)
        assert torch.equal(rows.tokens, (order // 3).int())
        assert torch.equal(chosen.flatten()[rows.places.long().argsort()], numbers)
        counts = torch.bincount(chosen.flatten(), minlength=11)
        assert torch.equal(rows.starts, torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32))


def check_experts() -> None:
    """Few and many tokens, in tiles of other sizes; experts with no row and with more than a tile."""
    num_experts, size, inner, num_tokens = 4, 40, 72, 140
    gate_up, down = half(num_experts, 2 * inner, size) * 0.2, half(num_experts, size, inner) * 0.2
    x, logits = half(num_tokens, size), half(num_tokens, num_experts)
    logits[:, 3] = -9.0
    logits[:, 1] += 4.0
    weights, chosen = expert_kernels.route(logits, 2, renormalize=True)
    whole = expert_kernels.experts(x, gate_up, down, weights, chosen, swiglu=kernels.swiglu).out
    wanted = torch.zeros(num_tokens, size)
    for place in range(2):
        gate, up = torch.einsum("nh,nih->ni", x.float(), gate_up[chosen[:, place].long()].float()).chunk(2, -1)
        out = torch.einsum("ni,nhi->nh", torch.nn.functional.silu(gate) * up, down[chosen[:, place].long()].float())
        wanted += weights[:, place, None] * out
    torch.testing.assert_close(whole.float(), wanted, rtol=1e-2, atol=1e-2)
    for some in (slice(0, 1), slice(7, 80)):
        few = expert_kernels.experts(x[some], gate_up, down, weights[some], chosen[some], swiglu=kernels.swiglu).out
        torch.testing.assert_close(few.float(), wanted[some], rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    check_routing()
    check_sorting()
    check_experts()
    check_products()
    check_norm_and_sums()
    check_attention()
    check_rotation_and_activation()
