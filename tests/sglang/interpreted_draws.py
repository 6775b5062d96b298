"""Draw tokens with the kernels of `fuligo_draw` in Triton's interpreter, without a GPU, and compare them with torch; exit with an error if
they differ.

For an interpreter with triton and a CPU build of torch, such as SGLang's.
"""

import sys
from pathlib import Path

import sitecustomize
import torch

sys.path.append(str(Path(__file__).parents[2] / "fuligo" / "engines" / "sglang" / "sampler"))
sitecustomize.interpret_kernels()
import fuligo_draw  # noqa: E402

ROWS = 160
torch.manual_seed(0)


def check_logprobs() -> None:
    """Several parts per row, the last one shorter, and one without an allowed token."""
    logits, temperatures = 5 * torch.randn(5, 2 * fuligo_draw.LOGITS + 77), torch.tensor([[1.0], [0.7], [1.3], [1e-3], [1.0]])
    logits[4, fuligo_draw.LOGITS :] = -torch.inf
    logits[4] -= 200.0
    tokens, logprobs = fuligo_draw.draw(logits, temperatures)
    wanted = (logits / temperatures).log_softmax(1).gather(1, tokens[:, None].long())[:, 0]
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
    assert tokens.dtype == torch.int32 and tokens[3] == logits[3].argmax() and tokens[4] < fuligo_draw.LOGITS


def check_padded_rows() -> None:
    """Compare rows that are parts of longer ones, as with a padded vocabulary in float32, with contiguous copies."""
    padded, temperatures = 5 * torch.randn(4, fuligo_draw.LOGITS + 100), torch.full((4, 1), 0.9)
    padded[:, -60:] = 1e4  # would be drawn if the padding were read
    drawn = []
    for logits in (padded[:, :-60], padded[:, :-60].contiguous()):
        torch.manual_seed(11)
        drawn.append(fuligo_draw.draw(logits, temperatures))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])


def check_distribution() -> None:
    """Compare frequencies with the softmax, and draws of neighboring rows with those of independent ones."""
    logits = torch.tensor([3.0, 1.0, 0.0, -torch.inf, 2.0, -1.0]).repeat(ROWS, 1)
    temperature = 1.5
    wanted = (logits[0] / temperature).softmax(0)
    tokens, _ = fuligo_draw.draw(logits, torch.full((ROWS, 1), temperature))
    counts = torch.bincount(tokens.long(), minlength=6)
    assert counts[3] == 0
    deviations = (counts - ROWS * wanted)[wanted > 0] / (ROWS * wanted * (1 - wanted))[wanted > 0].sqrt()
    assert deviations.abs().max() < 4, deviations
    changes = (tokens[1:] != tokens[:-1]).double().mean()
    assert abs(changes - (1 - (wanted**2).sum())) < 0.15, changes


def check_small_temperatures() -> None:
    """Two of the tokens are equally likely, in different parts of a row; logits divided by the temperature have an ulp of 2."""
    num_rows, num_logits = 40, fuligo_draw.LOGITS + 3
    logits = torch.full((num_rows, num_logits), 18.0)
    logits[:, [3, 7, num_logits - 1]] = torch.tensor([20.0, 19.5, 20.0])
    tokens, logprobs = fuligo_draw.draw(logits, torch.full((num_rows, 1), 1e-6))
    counts = torch.bincount(tokens.long(), minlength=num_logits)
    assert counts[3] + counts[-1] == num_rows and 9 < counts[3] < 31, counts[[3, -1]]
    torch.testing.assert_close(logprobs, torch.full((num_rows,), 0.5).log())


def check_seeds() -> None:
    """torch's generator decides: equal seeds draw equal tokens, as ranks of an engine must, and each call draws others."""
    logits, temperatures = torch.zeros(20, 500), torch.ones(20, 1)
    torch.manual_seed(7)
    first, second = (fuligo_draw.draw(logits, temperatures)[0] for _ in range(2))
    torch.manual_seed(7)
    assert torch.equal(fuligo_draw.draw(logits, temperatures)[0], first) and not torch.equal(first, second)
    torch.manual_seed(7)
    assert (fuligo_draw.draw(logits, temperatures, replica=1)[0] != first).sum() > 15, "replicas draw different tokens"


def check_damaged_logits() -> None:
    for damage in (torch.nan, torch.inf):
        logits = torch.zeros(2, 10)
        logits[1, 4] = damage
        try:
            fuligo_draw.draw(logits, torch.ones(2, 1))
        except RuntimeError as error:
            assert "logits are NaN or infinite" in str(error)
        else:
            raise AssertionError(f"{damage} was drawn from")


check_logprobs()
check_padded_rows()
check_distribution()
check_small_temperatures()
check_seeds()
check_damaged_logits()
