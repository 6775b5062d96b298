"""Sampling of tokens: top-k, top-p and min-p filters, inverse transform sampling, counter-based uniform numbers. Pure functions."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256
"""Number of tokens per block on the first level of the inverse CDF."""


@dataclass(slots=True)
class Filter:
    """Rows of a batch to filter before sampling, with their top-p, top-k and min-p."""

    rows: torch.Tensor
    """[F] int64 rows that are filtered."""
    top_p: torch.Tensor
    """[F, 1] cumulative probability to keep; 1 means no limit."""
    top_k: torch.Tensor
    """[F, 1] int64 number of tokens to keep; the vocabulary size means no limit."""
    min_p: torch.Tensor
    """[F, 1] smallest probability to keep, as a fraction of the highest; 0 means no limit."""


def filtered(probs: torch.Tensor, cut: Filter) -> torch.Tensor:
    """Return `probs` [F, V] with zeros for the tokens that top-k, top-p or min-p exclude.

    Each filter reads the original distribution; among equal probabilities, smaller token ids are kept.
    """
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    total = ordered.sum(-1, keepdim=True, dtype=torch.float64)
    keep = torch.arange(probs.shape[-1], device=probs.device) < cut.top_k
    keep &= before < cut.top_p * total
    keep &= ordered >= cut.min_p * ordered[:, :1]
    return torch.zeros_like(probs).scatter_(-1, tokens, torch.where(keep, ordered, 0))


def inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative weight exceeds `uniform` times the total: [N, V], [N] float64 -> [N].

    Cumulative sums over blocks and over the tokens of a block are float64; in float32 they would lose the tail of a large vocabulary.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = -(-vocab_size // BLOCK)
    blocks = torch.nn.functional.pad(weights, (0, num_blocks * BLOCK - vocab_size)).view(num_rows, num_blocks, BLOCK)
    block_cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (uniform * block_cdf[:, -1])[:, None]
    block = torch.searchsorted(block_cdf, target, right=True).clamp_(max=num_blocks - 1)
    below = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp_(min=0)), 0.0)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double()
    cdf = chosen.cumsum(-1)
    # The two levels round differently, so the search is limited to the block's last token with weight.
    within = torch.minimum(target - below, cdf[:, -1:] * (1 - 2**-52))
    return (block * BLOCK + torch.searchsorted(cdf, within, right=True))[:, 0].clamp_(max=vocab_size - 1)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [N] numbers in [0, 1), each a hash of its seed and position (finalizer of SplitMix64, Steele et al. 2014)."""
    mixed = _splitmix64(_splitmix64(seeds) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
