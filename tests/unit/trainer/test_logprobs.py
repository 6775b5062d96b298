"""Chunked log-probabilities against log_softmax of all logits at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuligo.trainer.torch_backend.logprobs import OutputHead, token_logprobs

N, E, V = 23, 8, 37


def by_definition(hidden, head, targets, temperature):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
    logits = (logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)) / temperature
    log_softmax = logits.log_softmax(-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def inputs(*, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(N, E, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, E, dtype=dtype, requires_grad=True)
    return hidden, OutputHead(weight, torch.randn(V, dtype=dtype, requires_grad=True) if bias else None), torch.randint(0, V, (N,))


@pytest.mark.parametrize("chunk_tokens", [1, 5, N, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("terms", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_values_and_gradients_equal_the_definition(chunk_tokens, temperature, terms, cap):
    hidden, head, targets = inputs(dtype=torch.float32)
    head = head._replace(cap=cap)
    upstream = torch.randn(2, N)
    upstream[0 if terms == "entropy" else 1] *= terms == "both"
    leaves = [hidden, head.weight, head.bias]

    def gradients(logprobs, entropy):
        used = {"logprobs": [logprobs], "entropy": [entropy], "both": [logprobs, entropy]}[terms]
        weights = {"logprobs": upstream[:1], "entropy": upstream[1:], "both": upstream}[terms]
        return torch.autograd.grad(used, leaves, list(weights))

    got = token_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    want = by_definition(hidden, head, targets, temperature)
    for mine, reference in zip(got, want):
        torch.testing.assert_close(mine, reference)
    for mine, reference in zip(gradients(*got), gradients(*want)):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


def test_half_precision_hidden_states_give_float32_logprobs():
    """Rounding logits to bfloat16 would change log-probabilities by up to 2^-8 of the logits."""
    hidden, head, targets = inputs(bias=False, dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=8)
    exact = by_definition(hidden.double(), OutputHead(head.weight.double(), None), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact[0].double(), atol=1e-5, rtol=0)
    torch.autograd.backward([logprobs.sum()])
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


class MostTokens(TorchDispatchMode):
    """Mode that records the most rows of any tensor with a vocabulary axis, except the transposed weight [E, V]."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (V,) and out.shape[:-1] != (E,):
            self.rows = max(self.rows, out.numel() // V)
        return out


@pytest.mark.parametrize("chunk_tokens", [1, 4, 16])
def test_logits_never_exist_for_more_tokens_than_a_chunk(chunk_tokens):
    hidden, head, targets = inputs(dtype=torch.float32)
    with MostTokens() as spy:
        logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=chunk_tokens)
        (logprobs.sum() + entropy.sum()).backward()
    assert spy.rows == chunk_tokens


def test_results_share_no_memory():
    """FSDP warns about views, because an in-place change would drop its hooks."""
    hidden, head, targets = inputs(dtype=torch.float32)
    got = token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=5)
    assert [tensor._base for tensor in got] == [None, None]
