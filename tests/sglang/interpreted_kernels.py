"""Run the batch-invariant kernels in Triton's interpreter, without a GPU, and compare them with torch; exit with an error if they differ.

For an interpreter with triton and a CPU build of torch, such as SGLang's. In float16: the interpreter does not know bfloat16.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from triton.runtime import interpreter

KERNELS = Path(__file__).parents[2] / "fuligo" / "models" / "invariant_kernels.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("kernels", KERNELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module._num_processors = lambda device: 7  # programs of the linear kernel, each of which computes several tiles
    return module


own_patch = interpreter._patch_lang_tensor


def patch(tensor: Any, scope: Any) -> None:
    """Let numpy 2.4 convert the interpreter's scalars, arrays of one element, to indices."""
    own_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patch
kernels = load()
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


check_products()
check_norm_and_sums()
check_attention()
check_rotation_and_activation()
