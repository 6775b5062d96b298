"""Times of the batch-invariant kernels of --exact-on-policy, compared with those of cuBLAS, torch and SGLang, on one GPU.

    python benchmarks/exact_kernels.py                    # shapes of Qwen3-4B and of Qwen3-30B-A3B's experts
    python benchmarks/exact_kernels.py --experts          # only the experts
    PYTHONPATH=SITE python benchmarks/exact_kernels.py    # with SGLang on the path: also its decoding kernel

Prints microseconds: the exact kernel, the other one, and their ratio.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

from fuligo.models import invariant_kernels
from fuligo.models.attention import packed_attention
from fuligo.models.gpu_invariant import experts, route
from fuligo.models.invariant_expert_kernels import sort_by_expert

HEADS, KEY_HEADS, SIZE = 32, 8, 128
PRODUCTS = ((2560, 19456), (9728, 2560), (2560, 6144), (4096, 2560))
"""Inputs and outputs of a layer's matrix products; gate and up are fused, and so are queries, keys and values, as in SGLang."""
EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
"""Experts per layer, experts per token, hidden size, and intermediate size of an expert."""


def main() -> None:
    torch.manual_seed(0)
    mixture()
    if "--experts" in sys.argv:
        return
    for num_rows in (64, 256, 512, 1024, 12_288):
        for num_inputs, num_outputs in PRODUCTS:
            x, weight = random(num_rows, num_inputs), random(num_outputs, num_inputs)
            report(
                f"product {num_rows} x {num_inputs} x {num_outputs}",
                lambda x=x, weight=weight: invariant_kernels.linear(x, weight, None, torch.bfloat16),
                lambda x=x, weight=weight: torch.nn.functional.linear(x, weight),
            )
    for num_requests, length in ((256, 400), (1024, 200), (32, 4000)):
        decoding(num_requests, length)
    prefill(12_288, 384)
    logits = torch.randn(4096, 49_152, device="cuda")
    report("log of the sum of exp 4096 x 49152", lambda: invariant_kernels.log_sum_exp(logits), lambda: logits.logsumexp(-1))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def report(name: str, exact: Callable[[], object], other: Callable[[], object] | None) -> None:
    own_us = 1e3 * do_bench(exact)
    other_us = float("nan") if other is None else 1e3 * do_bench(other)
    print(f"{name:40} {own_us:8.0f} {other_us:8.0f} {own_us / other_us:6.2f}", flush=True)


def decoding(num_requests: int, length: int) -> None:
    """Compare attention of one new token per request over a cache in random order."""
    num_keys = num_requests * length
    query, key, value = random(num_requests, HEADS, SIZE), random(num_keys, KEY_HEADS, SIZE), random(num_keys, KEY_HEADS, SIZE)
    starts = torch.arange(0, num_keys + 1, length, device="cuda", dtype=torch.int32)
    queries = torch.arange(num_requests + 1, device="cuda", dtype=torch.int32)
    slots, out, scale = torch.randperm(num_keys, device="cuda"), torch.empty_like(query), SIZE**-0.5
    sglang = None
    if find_spec("sglang") is not None:
        from sglang.srt.layers.attention.triton_ops.decode_attention import (
            decode_attention_fwd,
        )

        splits = 8
        partial = torch.empty(num_requests, HEADS, splits, SIZE, device="cuda")
        sums = torch.empty(num_requests, HEADS, splits, device="cuda")
        num_splits = torch.full((num_requests,), 4, device="cuda", dtype=torch.int32)

        def sglang() -> None:
            decode_attention_fwd(query, key, value, out, starts, slots, partial, sums, num_splits, splits, scale, 1.0, 1.0)

    exact = invariant_kernels.attention
    report(
        f"decoding, {num_requests} requests of {length}",
        lambda: exact(query, key, value, queries, starts, slots, longest=1, scale=scale, out=out),
        sglang,
    )


def prefill(num_tokens: int, length: int) -> None:
    query, key, value = random(num_tokens, HEADS, SIZE), random(num_tokens, KEY_HEADS, SIZE), random(num_tokens, KEY_HEADS, SIZE)
    bounds = tuple(range(0, num_tokens + 1, length))
    starts, slots = torch.tensor(bounds, device="cuda", dtype=torch.int32), torch.arange(num_tokens, device="cuda")
    out, scale = torch.empty_like(query), SIZE**-0.5
    exact = invariant_kernels.attention
    report(
        f"prefill, {num_tokens} tokens in {length}",
        lambda: exact(query, key, value, starts, starts, slots, longest=length, scale=scale, out=out),
        lambda: packed_attention(query, key, value, bounds, scale=scale),
    )


def mixture() -> None:
    """Compare a layer's experts with torch's grouped products, which transformers uses; with gradients from 4,096 tokens on."""
    gate_up, down = random(EXPERTS, 2 * INNER, HIDDEN) * 0.02, random(EXPERTS, HIDDEN, INNER) * 0.03
    for num_tokens in (1, 16, 64, 256, 1024, 4096, 16_384):
        x, logits = random(num_tokens, HIDDEN), random(num_tokens, EXPERTS)
        weights, chosen = route(logits, CHOSEN, renormalize=True)
        report(f"router, {num_tokens} tokens", lambda x=logits: route(x, CHOSEN, renormalize=True), lambda x=logits: plain_route(x))
        report(f"sorting, {num_tokens} tokens", lambda c=chosen: sort_by_expert(c, EXPERTS), lambda c=chosen: plain_sort(c))
        inputs = (x, gate_up, down, weights, chosen)
        report(f"experts, {num_tokens} tokens", lambda i=inputs: experts(*i), lambda i=inputs: plain_experts(*i))
        if num_tokens >= 4096:
            needed = [each.detach().requires_grad_() for each in inputs[:4]]
            ways = (lambda n=needed, c=chosen, w=way: torch.autograd.grad(w(*n, c).sum(), n) for way in (experts, plain_experts))
            report(f"experts and gradients, {num_tokens} tokens", *ways)


def plain_route(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(CHOSEN)
    return weights / weights.sum(-1, keepdim=True), chosen


def plain_sort(chosen: Tensor) -> tuple[Tensor, Tensor]:
    numbers, order = chosen.flatten().sort(stable=True)
    return order, torch.bincount(numbers, minlength=EXPERTS).cumsum(0).to(torch.int32)


def plain_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    order, ends = plain_sort(chosen)
    gate, up = F.grouped_mm(x[order // CHOSEN], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    out = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends) * weights.to(x.dtype).flatten()[order, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return out[places].unflatten(0, chosen.shape).sum(1)


if __name__ == "__main__":
    main()
