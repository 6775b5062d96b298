import numpy as np
import pytest
import torch

from fuligo.engines.embedded.request import Request
from fuligo.engines.embedded.scheduler import SamplingBatch, sample
from fuligo.engines.generation import SamplingParams

CPU = torch.device("cpu")


def request(seed: int = 0, output_ids: list[int] | None = None, end_ids: frozenset[int] = frozenset(), **params: object) -> Request:
    sampling = SamplingParams(100, **params)
    return Request("r", [1], sampling, end_ids, seed, output_ids=output_ids or [])


def allowed(probs: list[float], *, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> set[int]:
    """Compute the probabilities by definition, token by token."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = set()
    before = 0.0
    for rank, token in enumerate(order):
        if (top_k == -1 or rank < top_k) and before < top_p and probs[token] >= min_p * max(probs):
            kept.add(token)
        before += probs[token]
    return kept


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 4}])
def test_samples_follow_the_distribution(params: dict[str, float]) -> None:
    """Chi-square test against the definition with a fixed seed; the bound is far above the critical value."""
    num_draws = 20_000
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, 0.5, 1.0, -3.0, 0.2])
    probs = (logits / params.get("temperature", 1.0)).softmax(0)
    kept = allowed(probs.tolist(), **{name: value for name, value in params.items() if name != "temperature"})
    expected = np.array([probs[token].item() if token in kept else 0.0 for token in range(len(logits))])
    expected = num_draws * expected / expected.sum()
    batch = SamplingBatch.of([request(seed=9, **params)] * num_draws, len(logits), CPU)
    tokens, logprobs = sample(logits.expand(num_draws, -1), batch, np.arange(num_draws))
    counts = np.bincount(tokens.numpy(), minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 30  # 7 degrees of freedom: exceeded once in 10,000
    assert torch.allclose(logprobs, probs.log()[tokens], atol=1e-6), "log-probabilities are of the full distribution"


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    requests = [
        request(1),
        request(2, top_p=0.5),
        request(3, temperature=0.3),
        request(4, top_k=2),
        request(5),
        request(6, min_new_tokens=4, end_ids=frozenset([7])),
    ]
    positions = np.array([3, 9, 4, 4, 100, 7])
    together, scores = sample(logits, SamplingBatch.of(requests, 50, CPU), positions)
    for row, one in enumerate(requests):
        token, score = sample(logits[row : row + 1], SamplingBatch.of([one], 50, CPU), positions[row : row + 1])
        assert (token.item(), score.item()) == (together[row].item(), scores[row].item())


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, SamplingBatch.of([request(s, temperature=0.0) for s in range(4)], 30, CPU), np.arange(4))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert torch.allclose(logprobs, logits.log_softmax(-1).max(-1).values)


def test_end_tokens_are_suppressed_until_min_new_tokens_with_their_probability_unchanged() -> None:
    logits = torch.tensor([[0.0, 8.0, 0.0]]).expand(200, -1)
    early = [request(s, output_ids=[0, 0], end_ids=frozenset([1]), min_new_tokens=3) for s in range(200)]
    tokens, logprobs = sample(logits, SamplingBatch.of(early, 3, CPU), np.full(200, 5))
    assert 1 not in tokens.tolist()
    assert torch.allclose(logprobs, logits.log_softmax(-1)[0, 0].expand(200))
    late = [request(s, output_ids=[0, 0, 0], end_ids=frozenset([1]), min_new_tokens=3) for s in range(200)]
    assert 1 in sample(logits, SamplingBatch.of(late, 3, CPU), np.full(200, 5))[0].tolist()
