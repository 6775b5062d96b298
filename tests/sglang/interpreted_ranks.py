"""Run the plugin's operations as the two ranks of an engine would, in Triton's interpreter, and compare their bits with the trainer's.

The trainer holds whole matrices. In float16, and without communication: the sum of two ranks' numbers has one value.

    python interpreted_ranks.py PLUGIN

Runs in SGLang's interpreter. PLUGIN is the directory of the plugin, as an engine has it in `sys.path`. Prints the exit code of a process
that loads the plugin where SGLang lacks an operation, then the module of each operation that the plugin replaces.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2]), sys.argv[1]]
from interpreted_kernels import half
from sglang.srt.layers.moe import topk
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.sampler import Sampler
from sglang.srt.plugins import load_plugins

from fuligo.models import gpu_invariant

lacking = os.fork()
if lacking == 0:
    del Sampler._attach_logprobs_to_output
    load_plugins()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(lacking, 0)[1]))
load_plugins()
kernels: Any
expert_kernels: Any
kernels, expert_kernels = (sys.modules[f"fuligo_invariant_{name}"] for name in ("kernels", "expert_kernels"))
kernels._num_processors = lambda device: 5
gpu_invariant.kernels, gpu_invariant.expert_kernels = lambda: kernels, lambda: expert_kernels
RANKS = range(2)


def show_replaced() -> None:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.models import qwen3_moe, utils

    for operation in (
        UnquantizedLinearMethod.apply,
        RMSNorm.forward_cuda,
        RotaryEmbedding.forward_cuda,
        SiluAndMul.forward_cuda,
        UnquantizedFusedMoEMethod.forward_cuda,
        topk.fused_topk,
        qwen3_moe.enable_fused_set_kv_buffer,
        utils.can_use_fused_inplace_qknorm,
        TritonAttnBackend.__init__,
        LogitsProcessor._compute_lm_head,
        Sampler.forward,
        Sampler._attach_logprobs_to_output,
    ):
        print(operation.__module__)


def on_rank(rank: int, tensor: Tensor, axis: int) -> Tensor:
    return tensor.chunk(2, axis)[rank].contiguous()


def sglang_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return UnquantizedLinearMethod.apply(None, SimpleNamespace(weight=weight), x, bias)


def check_row_parallel_layers() -> None:
    x, weight, bias = half(70, 192), half(130, 192), half(130)
    for rows in (1, 70):
        first, second = (sglang_linear(on_rank(rank, x[:rows], 1), on_rank(rank, weight, 1), bias if rank == 0 else None) for rank in RANKS)
        whole = kernels.linear(x[:rows], weight, bias, torch.float16, 2)
        assert torch.equal(first + second, whole)
        torch.testing.assert_close(whole.float(), x[:rows].float() @ weight.float().t() + bias.float(), rtol=5e-3, atol=5e-2)
    assert not torch.equal(whole, kernels.linear(x, weight, bias, torch.float16)), "two roundings are not one"


def check_column_parallel_layers() -> None:
    """Columns and logits of a rank; the vocabulary is padded with rows of zeros."""
    x, weight, bias = half(70, 96), half(128, 96), half(128)
    parts = [sglang_linear(x, on_rank(rank, weight, 0), on_rank(rank, bias, 0)) for rank in RANKS]
    assert torch.equal(torch.cat(parts, 1), kernels.linear(x, weight, bias, torch.float16))
    head = half(100, 96)
    padded = torch.cat([head, torch.zeros(28, 96).half()])
    gathered = torch.cat([kernels.linear(x, on_rank(rank, padded, 0), None, torch.float32) for rank in RANKS], 1)[:, :100]
    logits = kernels.linear(x, head, None, torch.float32)
    assert torch.equal(gathered, logits)
    assert torch.equal(kernels.log_sum_exp(gathered), kernels.log_sum_exp(logits))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    starts = torch.tensor([0, len(query)], dtype=torch.int32)
    slots, out = torch.arange(len(key)), torch.empty_like(query)
    kernels.attention(query, key, value, starts, starts, slots, longest=len(query), scale=0.2, out=out)
    return out


def check_heads() -> None:
    """Each rank has half of the heads, or half of the query heads and a copy of the only key head."""
    for key_heads in (2, 1):
        query, key, value = half(70, 6, 32), half(70, key_heads, 32), half(70, key_heads, 32)
        shared = [[on_rank(rank, each, 1) if key_heads == 2 else each for each in (key, value)] for rank in RANKS]
        parts = [attention(on_rank(rank, query, 1), *shared[rank]) for rank in RANKS]
        assert torch.equal(torch.cat(parts, 1), attention(query, key, value))


def check_experts() -> None:
    """SGLang's ranks have half of the gate and up columns each, and half of the inputs of the last matrix."""
    num_experts, size, inner = 6, 40, 32
    gate, up, down = half(num_experts, inner, size), half(num_experts, inner, size), half(num_experts, size, inner)
    x, logits = half(66, size), half(66, num_experts)
    routed = topk.select_experts.__globals__["fused_topk"](x, logits, 2, True)
    weights, chosen = gpu_invariant.route(logits, 2, renormalize=True)
    assert torch.equal(routed[0], weights) and torch.equal(routed[1], chosen)
    dispatched = SimpleNamespace(hidden_states=x, topk_output=(*routed, logits))

    def sglang_experts(layer: Any) -> Tensor:
        return UnquantizedFusedMoEMethod.forward_cuda(None, layer, dispatched).hidden_states

    gate_up = torch.cat([gate, up], 1)
    alone = sglang_experts(SimpleNamespace(w13_weight=gate_up, w2_weight=down))
    assert torch.equal(alone, gpu_invariant.experts(x, gate_up, down, weights, chosen))
    first, second = (
        sglang_experts(
            SimpleNamespace(
                w13_weight=torch.cat([on_rank(rank, gate, 1), on_rank(rank, up, 1)], 1),
                w2_weight=on_rank(rank, down, 2),
            )
        )
        for rank in RANKS
    )
    assert torch.equal(first + second, gpu_invariant.experts(x, gate_up, down, weights, chosen, ranks=2))


def check_gradients() -> None:
    num_experts, size, inner = 5, 32, 48
    x, gate_up, down = half(33, size), half(num_experts, 2 * inner, size) * 0.2, half(num_experts, size, inner) * 0.2
    logits, seen = half(33, num_experts), half(33, size)
    logits[:, 3] = -9.0  # chosen by none
    inputs = [each.requires_grad_() for each in (x, gate_up, down, logits)]
    for renormalize in (True, False):
        weights, chosen = gpu_invariant.route(logits, 2, renormalize=renormalize)
        found = torch.autograd.grad((gpu_invariant.experts(x, gate_up, down, weights, chosen, ranks=2) * seen).sum(), inputs)
        wide = [each.detach().double().requires_grad_() for each in inputs]
        shares = wide[3].softmax(-1).gather(1, chosen.long())
        shares = shares / shares.sum(-1, keepdim=True) if renormalize else shares
        total = torch.zeros(33, size, dtype=torch.float64)
        for place, numbers in enumerate(chosen.long().unbind(1)):
            gate, up = torch.einsum("nh,nih->ni", wide[0], wide[1][numbers]).chunk(2, -1)
            out = torch.einsum("ni,nhi->nh", torch.nn.functional.silu(gate) * up, wide[2][numbers])
            total = total + shares[:, place, None] * out
        for own, wanted in zip(found, torch.autograd.grad((total * seen.double()).sum(), wide), strict=True):
            assert (own.double() - wanted).norm() < 2e-3 * wanted.norm()


show_replaced()
check_row_parallel_layers()
check_column_parallel_layers()
check_heads()
check_experts()
check_gradients()
