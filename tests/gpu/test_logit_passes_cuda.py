"""Compiled passes over logits against the same operations one by one."""

import pytest
import torch
from torch import Tensor

from fuligo.trainer import logprobs as logit_passes
from fuligo.trainer.logprobs import RowSums, grad_of_logits, row_sums

V = 151_936
NUM_ROWS = [4096, 1, 1777, 16384]
"""Row counts above and below the first; the last has more values than an int32 counts."""


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_metric_sums_add_up(num_rows: int) -> None:
    logits = drawn(num_rows)
    compiled = row_sums(logits)
    for rows in torch.arange(num_rows).split(512):
        plain = RowSums(*logit_passes._row_sums(logits[rows]))
        for one, other in zip(compiled, plain, strict=True):
            torch.testing.assert_close(one[rows], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_gradient(num_rows: int, with_entropy: bool) -> None:
    logits = drawn(num_rows)
    peak, total, weighted = row_sums(logits)
    log_total, entropy = peak + total.log(), total.log() - weighted / total
    targets = torch.randint(V, (num_rows,), device="cuda")
    grads = torch.randn(2, num_rows, device="cuda")
    given = targets, log_total, entropy, grads[0], grads[1] if with_entropy else None
    compiled = grad_of_logits(logits, *given, torch.bfloat16)
    for rows in torch.arange(num_rows, device="cuda").split(512):
        parts = tuple(value if value is None else value[rows] for value in given)
        wanted = logit_passes._grad_without_targets(logits[rows], *parts[1:], torch.float32)
        wanted.scatter_add_(1, targets[rows, None], grads[0][rows, None])
        torch.testing.assert_close(compiled[rows].float(), wanted, rtol=2**-8, atol=1e-9)


def drawn(num_rows: int) -> Tensor:
    return 4 * torch.randn(num_rows, V, device="cuda", generator=torch.Generator("cuda").manual_seed(num_rows))
