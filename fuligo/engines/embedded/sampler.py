"""Sampling of the next token of each request: it depends on the request's logits, seed and position alone, never on the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fuligo.engines.embedded.request import Request
from fuligo.models.sampling import Filter, filtered, inverse_cdf, uniforms

GREEDY_BELOW = 1e-6
"""Temperature below which the most likely token is taken, with its log-probability at temperature 1."""


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of a batch's rows, as tensors."""

    seeds: NDArray[np.uint64]
    """[N]"""
    temperature: torch.Tensor | None
    """[N, 1]; None if all are 1."""
    filter: Filter | None
    suppressed: list[tuple[int, list[int]]]
    """(row, tokens that it must not sample yet)"""

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, device: torch.device) -> SamplingBatch:
        params = [request.params for request in requests]
        greedy = [p.temperature < GREEDY_BELOW for p in params]
        temperatures = [1.0 if g else p.temperature for p, g in zip(params, greedy)]
        top_k = [1 if g else p.top_k if p.top_k > 0 else vocab_size for p, g in zip(params, greedy)]
        cut = [i for i, p in enumerate(params) if top_k[i] < vocab_size or p.top_p < 1 or p.min_p > 0]

        def column(values: list[float] | list[int]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        return cls(
            seeds=np.array([request.seed for request in requests], np.uint64),
            temperature=column(temperatures) if any(t != 1 for t in temperatures) else None,
            filter=Filter(
                torch.tensor(cut, device=device),
                column([params[i].top_p for i in cut]),
                column([top_k[i] for i in cut]),
                column([params[i].min_p for i in cut]),
            )
            if cut
            else None,
            suppressed=[
                (i, sorted(token for token in r.end_ids if token < vocab_size))
                for i, r in enumerate(requests)
                if len(r.output_ids) < r.params.min_new_tokens and r.end_ids
            ],
        )


def sample(logits: torch.Tensor, batch: SamplingBatch, positions: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    Args:
        logits: [N, V]
        positions: [N] positions of the tokens to sample, counted from the start of the prompt

    Returns:
        Tokens [N] int64, and their log-probabilities [N] float32: log softmax(logits / T) over the full vocabulary, before
        top-p, top-k, min-p and the suppression of end tokens
    """
    logits = logits.float()
    if batch.temperature is not None:
        logits = logits / batch.temperature
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    for row, tokens in batch.suppressed:
        probs[row, tokens] = 0
    if batch.filter is not None:
        probs[batch.filter.rows] = filtered(probs[batch.filter.rows], batch.filter)
    uniform = torch.from_numpy(uniforms(batch.seeds, positions)).to(logits.device)
    tokens = inverse_cdf(probs, uniform)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
