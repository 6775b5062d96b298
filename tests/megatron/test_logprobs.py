"""Vocabulary-parallel log-probabilities: two ranks against one with the whole vocabulary and no padding."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fuligo.trainer.megatron_backend.logprobs import vocab_parallel_logprobs
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.logprobs import OutputHead, token_logprobs
from tests.megatron.ranks import RankPool

N, E, V = 23, 8, 37
PADDED = {"in the last part": 48, "a whole part": 80}
"""Vocabulary sizes with padding: 13 of the second rank's rows are tokens, or none."""
SCALES = {"usual": 1.0, "extreme": 400.0}


@dataclass(slots=True)
class Values:
    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def inputs(scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden [N, E], weight [V, E], targets [N], and gradients [2, N] of log-probabilities and entropies."""
    torch.manual_seed(0)
    return scale * torch.randn(N, E), torch.randn(V, E), torch.randint(0, V, (N,)), torch.randn(2, N)


def parallel(world: World, padded: int, scale: float, has_main_grad: bool, terms: str) -> Values:
    """Return this rank's values; its gradient of the hidden states is one summand."""
    hidden, weight, targets, upstream = inputs(scale)
    whole = torch.full((padded, E), 1e6)  # the content of padding must not matter
    whole[:V] = weight
    hidden.requires_grad_()
    own = torch.nn.Parameter(whole.chunk(world.size)[world.rank].clone())
    if has_main_grad:
        own.main_grad = torch.ones_like(own)
    group = dist.group.WORLD
    assert group is not None
    values = vocab_parallel_logprobs(hidden, own, targets, temperature=0.7, chunk_tokens=5, num_vocab=V, tp_group=group)
    kept = {"logprobs": [0], "entropy": [1], "both": [0, 1]}[terms]
    torch.autograd.backward([values[i] for i in kept], [upstream[i] for i in kept])
    assert own.grad is not None and hidden.grad is not None
    grad_weight = own.grad
    if has_main_grad:
        assert own.grad_added_to_main_grad
        grad_weight = own.main_grad - 1  # added to the ones that were there before
    return Values(values.logprobs.detach(), values.entropy.detach(), hidden.grad, grad_weight)


def single(scale: float, terms: str) -> Values:
    hidden, weight, targets, upstream = inputs(scale)
    hidden.requires_grad_()
    weight.requires_grad_()
    values = token_logprobs(hidden, OutputHead(weight, None), targets, temperature=0.7, chunk_tokens=N)
    kept = {"logprobs": [0], "entropy": [1], "both": [0, 1]}[terms]
    torch.autograd.backward([values[i] for i in kept], [upstream[i] for i in kept])
    assert weight.grad is not None and hidden.grad is not None
    return Values(values.logprobs.detach(), values.entropy.detach(), hidden.grad, weight.grad)


@pytest.mark.parametrize(
    ("padding", "scale", "has_main_grad", "terms"),
    [
        ("in the last part", "usual", False, "both"),
        ("a whole part", "usual", True, "both"),
        ("in the last part", "extreme", True, "logprobs"),
        ("in the last part", "usual", True, "entropy"),
    ],
)
def test_two_ranks_equal_one(pool: RankPool, padding: str, scale: str, has_main_grad: bool, terms: str) -> None:
    ranks = pool.run(2, parallel, PADDED[padding], SCALES[scale], has_main_grad, terms)
    want = single(SCALES[scale], terms)
    for rank in ranks:
        torch.testing.assert_close(rank.logprobs, want.logprobs, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(rank.entropy, want.entropy, rtol=1e-5, atol=1e-5)
    assert want.logprobs.isfinite().all()
    torch.testing.assert_close(sum(rank.grad_hidden for rank in ranks), want.grad_hidden, rtol=1e-4, atol=1e-5)
    grad_weight = torch.cat([rank.grad_weight for rank in ranks])
    torch.testing.assert_close(grad_weight[:V], want.grad_weight, rtol=1e-4, atol=1e-5 * SCALES[scale])
    assert not grad_weight[V:].any()
