"""Arguments of torch's varlen operators, whose flash kernels need CUDA; tests/gpu/test_sinks_cuda.py has their results."""

import inspect
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from fuligo.models import sink_attention
from fuligo.models.sink_attention import VarlenKernel

STARTS = [0, *accumulate([130, 7])]
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64


def kernel(window: int | None = None) -> VarlenKernel:
    starts = torch.tensor(STARTS, dtype=torch.int32, device="meta")
    return VarlenKernel(starts, starts, 130, 130, HEAD_DIM**-0.5, window)


def rows() -> list[Tensor]:
    """Return query, key and value without data."""
    return [torch.empty(STARTS[-1], heads, HEAD_DIM, dtype=torch.bfloat16, device="meta") for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


@pytest.mark.parametrize("window", [None, 32])
def test_the_operators_of_this_torch_take_the_arguments(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows()
    out, log_sum_exp = kernel(window).forward(*given)
    assert out.shape == given[0].shape and log_sum_exp.shape == given[0].shape[:2]
    gradients = kernel(window).backward(out, *given, out, log_sum_exp)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in given]
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", lambda *args: shapes.append(tuple(args[5].shape)) or given)
    kernel(window).backward(out, *given, out, log_sum_exp)
    assert shapes == [(HEADS, STARTS[-1])], "log-sum-exp as the forward pass returned it"


def test_torch_2_11_has_no_argument_for_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make install-gpu` installs it."""
    bound: dict[str, Any] = {}
    wanted = inspect.signature(
        lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None: None
    )

    def operator(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        bound.update(wanted.bind(*args).arguments)
        return args[0], torch.empty(HEADS, STARTS[-1], device="meta"), args[0]

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", operator)
    monkeypatch.setattr(sink_attention, "TORCH_ASKS_FOR_GQA", False)
    kernel(window=32).forward(*rows())
    assert (bound["is_causal"], bound["scale"], bound["window_size"]) == (False, 0.125, [31, 0])
