"""The faster RMSNorm equals transformers' forward and backward; other modules are left unchanged."""

import copy

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fuligo.models.modules import speed_up_rms_norms
from tests import tiny


@pytest.mark.parametrize("shape", [(7, 32), (2, 5, 4, 32), (1, 32)])
def test_output_and_gradients_are_those_of_transformers(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(32)
    norm.weight.data.normal_()
    fast = copy.deepcopy(norm)
    assert speed_up_rms_norms(fast) == 1
    x, upstream = torch.randn(shape), torch.randn(shape)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    fast(ours).backward(upstream)
    norm(theirs).backward(upstream)
    torch.testing.assert_close(fast(x), norm(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.weight.grad, norm.weight.grad, rtol=1e-5, atol=1e-6)


def test_output_without_gradients_is_the_same_bit_for_bit() -> None:
    norm = Qwen3RMSNorm(32)
    norm.weight.data.normal_()
    speed_up_rms_norms(norm)
    x = torch.randn(7, 32)
    before = x.clone()
    with torch.inference_mode():
        without_gradients = norm(x)
    assert torch.equal(without_gradients, norm(x))
    assert torch.equal(x, before)


def test_all_norms_of_a_model_are_found_and_its_logits_stay() -> None:
    model = tiny.model("qwen3")
    ids = torch.randint(3, 300, (2, 11))
    before = model(ids).logits
    assert speed_up_rms_norms(model) == 2 * 4 + 1  # two layers: before attention and MLP, of queries and keys; and the last
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)


def test_a_norm_with_another_scale_is_not_replaced() -> None:
    assert speed_up_rms_norms(GemmaRMSNorm(16)) == 0


def test_half_precision_takes_the_module_s_own_forward() -> None:
    norm = Qwen3RMSNorm(16)
    speed_up_rms_norms(norm)
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm.bfloat16()(x.bfloat16()), Qwen3RMSNorm(16).bfloat16()(x.bfloat16()), rtol=0, atol=0)
