"""Gated delta-rule layers with flash-linear-attention's varlen kernels against plain torch, one sequence at a time.

pip install flash-linear-attention causal-conv1d
python -m pytest -s tests/gpu/test_gated_delta_cuda.py
"""

from contextlib import ExitStack
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from fuligo.models.gated_delta import gated_delta_modules, is_kernel, pack_gated_delta, sequence_arguments
from tests import tiny

pytestmark = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")

STARTS = (0, *accumulate([130, 7, 300, 64]))
SHAPE = {"layers": 2, "hidden": 256, "head_dim": 64, "layer_types": ["linear_attention"] * 2}
HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


def layers(device: str, dtype: torch.dtype) -> Any:
    """Return the same model, with weights that bfloat16 holds, on any device; on a CPU with transformers' own functions."""
    names = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "FusedRMSNormGated")
    with ExitStack() as stack:
        for name in names if device == "cpu" else ():
            stack.enter_context(patch.object(modeling_qwen3_5, name, None))
        return tiny.model("qwen3_5_text", **SHAPE, **HEADS).bfloat16().to(device, dtype).model


def embedded(device: str, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(1, STARTS[-1], SHAPE["hidden"], generator=torch.Generator().manual_seed(0))
    return drawn.bfloat16().to(device, dtype).requires_grad_()


def packed(model: Any, inputs: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(STARTS)])[None].to(inputs.device)
    arguments = sequence_arguments(STARTS, inputs.device)
    return model(inputs_embeds=inputs, position_ids=positions, use_cache=False, **arguments).last_hidden_state


def test_packed_kernels_compute_each_sequence_alone() -> None:
    """The reference is transformers' float32 on the CPU; bfloat16 in plain torch sets the bound."""
    reference, plain, kernels = layers("cpu", torch.float32), layers("cpu", torch.bfloat16), layers("cuda", torch.bfloat16)
    rules = [module.chunk_gated_delta_rule for module in gated_delta_modules(kernels)]
    assert all(map(is_kernel, rules)), "transformers does not find them"
    pack_gated_delta(kernels)
    for module, rule in zip(gated_delta_modules(kernels), rules, strict=True):
        module.chunk_gated_delta_rule = rule  # also on GPUs where only its gradients are wrong
    with torch.no_grad():
        alone = [
            torch.cat([model(inputs_embeds=inputs[:, a:b], use_cache=False).last_hidden_state for a, b in pairwise(STARTS)], 1).float()
            for model, inputs in ((reference, embedded("cpu", torch.float32)), (plain, embedded("cpu", torch.bfloat16)))
        ]
        found = packed(kernels, embedded("cuda", torch.bfloat16)).float().cpu()
    noise, difference = ((each - alone[0]).abs().mean().item() for each in (alone[1], found))
    print(f"kernels {difference:.2e}, plain bfloat16 {noise:.2e}")
    assert difference < 2 * noise


def test_no_gradient_flows_from_one_sequence_to_another() -> None:
    model, inputs = layers("cuda", torch.bfloat16), embedded("cuda", torch.bfloat16)
    pack_gated_delta(model)
    packed(model, inputs)[0, STARTS[2] : STARTS[3]].float().square().sum().backward()
    assert inputs.grad is not None
    others = torch.cat([inputs.grad[0, : STARTS[2]], inputs.grad[0, STARTS[3] :]])
    assert not others.any()
    assert inputs.grad[0, STARTS[2] : STARTS[3]].abs().sum(-1).all()
