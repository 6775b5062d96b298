"""Tokens that engines draw in one pass over the logits (`fuligo_draw`) against torch's softmax."""

import sys

import pytest
import torch

from fuligo.engines.sglang.server import SAMPLER_PLUGIN

pytest.importorskip("triton")
sys.path.append(str(SAMPLER_PLUGIN))
import fuligo_draw


@pytest.mark.parametrize("num_logits", [151_936, 49_152, 1000, 262_145])
@pytest.mark.parametrize("num_rows", [1, 7, 1024])
def test_logprobs_are_those_of_the_softmax(num_rows: int, num_logits: int) -> None:
    torch.manual_seed(0)
    logits, temperatures = 4 * torch.randn(num_rows, num_logits, device="cuda"), 0.5 + torch.rand(num_rows, 1, device="cuda")
    logits[:, num_logits // 2 : num_logits // 2 + 300] = -torch.inf
    tokens, logprobs = fuligo_draw.draw(logits, temperatures)
    wanted = (logits / temperatures).log_softmax(1).gather(1, tokens[:, None].long())[:, 0]
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-4)


def test_padded_rows_give_what_a_copy_of_them_gives() -> None:
    torch.manual_seed(0)
    padded, temperatures = 4 * torch.randn(300, 49_280, device="cuda"), torch.full((300, 1), 0.9, device="cuda")
    padded[:, 49_152:] = 1e4  # would be drawn if the padding were read
    drawn = []
    for logits in (padded[:, :49_152], padded[:, :49_152].contiguous()):
        torch.cuda.manual_seed(11)
        drawn.append(fuligo_draw.draw(logits, temperatures))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])


@pytest.mark.parametrize("spread", [0.0, 2.0, 6.0])
def test_frequencies_are_the_probabilities(spread: float) -> None:
    """Count 2 million draws from 100,000 tokens, in 500 groups, with nearly uniform and with peaked distributions."""
    torch.manual_seed(1)
    row = spread * torch.randn(100_000, device="cuda")
    probabilities = row.double().softmax(0)
    logits, temperatures = row.repeat(2000, 1), torch.ones(2000, 1, device="cuda")
    counts = torch.zeros(100_000, device="cuda", dtype=torch.float64)
    for _ in range(1000):
        counts += torch.bincount(fuligo_draw.draw(logits, temperatures)[0], minlength=100_000)
    groups = torch.argsort(probabilities) % 500
    found, wanted = (torch.zeros(500, device="cuda", dtype=torch.float64).index_add_(0, groups, each) for each in (counts, probabilities))
    num_draws = 2_000_000
    assert counts.sum() == num_draws
    deviations = (found - num_draws * wanted) / (num_draws * wanted * (1 - wanted)).sqrt()
    assert abs(deviations.square().mean().item() - 1) < 0.35, "chi-square of 499 degrees of freedom, within 5 standard deviations"
    assert deviations.abs().max() < 5


def test_equal_seeds_draw_equal_tokens() -> None:
    logits, temperatures = torch.zeros(300, 5000, device="cuda"), torch.ones(300, 1, device="cuda")
    torch.cuda.manual_seed(3)
    first, second = (fuligo_draw.draw(logits, temperatures)[0] for _ in range(2))
    torch.cuda.manual_seed(3)
    assert torch.equal(fuligo_draw.draw(logits, temperatures)[0], first) and not torch.equal(first, second)
    assert len(first.unique()) > 270, "rows are independent"
    torch.cuda.manual_seed(3)
    assert (fuligo_draw.draw(logits, temperatures, replica=1)[0] != first).sum() > 290, "replicas with the same seed are independent"
