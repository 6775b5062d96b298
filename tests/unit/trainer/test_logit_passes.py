"""Passes over logits against autograd through softmax, with the whole vocabulary and with two shards of it."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fuligo.trainer import logprobs as logit_passes
from fuligo.trainer.logprobs import grad_of_logits, row_sums

N, V = 7, 31


def drawn(*, scale: float) -> tuple[Tensor, Tensor]:
    """Draw float64 logits and targets."""
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(N, V, generator=generator, dtype=torch.float64), torch.randint(V, (N,), generator=generator)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_sums_of_parts_seen_from_the_highest_peak_add_up(scale: float) -> None:
    logits, _ = drawn(scale=scale)
    whole = row_sums(logits)
    torch.testing.assert_close(whole.peak + whole.total.log(), logits.logsumexp(-1))
    parts = [row_sums(part).seen_from(whole.peak) for part in logits.split(20, dim=1)]
    torch.testing.assert_close([sum(values) for values in zip(*parts, strict=True)], [whole.total, whole.weighted])
    torch.testing.assert_close(whole.total.log() - whole.weighted / whole.total, torch.distributions.Categorical(logits=logits).entropy())


@pytest.mark.parametrize("of", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_gradient_is_autograds(scale: float, of: str) -> None:
    logits, targets = drawn(scale=scale)
    grad_logprobs, grad_entropy = torch.randn(2, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    log_softmax = logits.log_softmax(-1)
    logprobs, entropy = log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)
    wanted = {"both": (grad_logprobs, grad_entropy), "logprobs": (grad_logprobs, None), "entropy": (None, grad_entropy)}[of]
    sum((value * grad).sum() for value, grad in zip((logprobs, entropy), wanted, strict=True) if grad is not None).backward()
    assert logits.grad is not None

    detached = logits.detach()
    common = detached.logsumexp(-1), entropy.detach(), *wanted, torch.float64
    torch.testing.assert_close(grad_of_logits(detached, targets, *common), logits.grad)
    parts = detached.split(20, dim=1)
    in_parts = [grad_of_logits(part, targets - first, *common) for part, first in zip(parts, (0, 20), strict=True)]
    torch.testing.assert_close(torch.cat(in_parts, dim=1), logits.grad)


def test_a_rank_without_tokens_has_no_gradient() -> None:
    _, targets = drawn(scale=1.0)
    ones = torch.ones(N)
    assert grad_of_logits(torch.empty(N, 0), targets - V, ones, ones, ones, ones, torch.bfloat16).shape == (N, 0)


def test_the_target_of_a_certain_token_is_rounded_once() -> None:
    """p is so close to 1 that bfloat16 cannot distinguish them; the gradient 1 - p must not be lost."""
    logits = torch.tensor([[0.0, 6.0]])
    log_total = logits.logsumexp(-1)
    left = -torch.expm1(6.0 - log_total.double())
    grad = grad_of_logits(logits, torch.tensor([1]), log_total, torch.zeros(1), torch.ones(1), None, torch.bfloat16)
    torch.testing.assert_close(grad[0].double(), torch.stack([-left[0], left[0]]), rtol=0.03, atol=0.0)


@pytest.mark.parametrize(("num_rows", "is_compiled"), [(1, False), (2, True)])
def test_a_single_row_is_not_compiled(num_rows: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of rows share one graph."""
    monkeypatch.setattr(logit_passes, "_compiled", lambda pass_: "compiled")
    with FakeTensorMode():
        chosen = logit_passes._compiled_on_gpu(logit_passes._row_sums, torch.empty(num_rows, V, device="cuda"))
    assert (chosen == "compiled") == is_compiled
