"""Random rollouts for trainer tests, ready to train on."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from fuligo.types import TrainBatch, TrainSample

VOCAB_SIZE = 400


def sample(index: int, *, prompt_length: int, response_length: int, seed: int = 0) -> TrainSample:
    """Return a sample with random tokens, advantages, log-probabilities and mask; at least its last token is trained."""
    rng = np.random.default_rng((seed, index))
    mask = (rng.random(response_length) < 0.8).astype(np.int8)
    mask[-1:] = 1
    return TrainSample(
        index=index,
        group_index=index // 2,
        tokens=rng.integers(3, VOCAB_SIZE, prompt_length + response_length).astype(np.int32),
        prompt_length=prompt_length,
        loss_mask=mask,
        reward=float(rng.random()),
        engine_logprobs=rng.uniform(-8, -4, response_length).astype(np.float32),
        versions=np.zeros(response_length, np.int32),
        mask_sum=float(mask.sum()),
        advantages=rng.standard_normal(response_length).astype(np.float32),
    )


def samples(lengths: Sequence[tuple[int, int]], *, seed: int = 0) -> list[TrainSample]:
    """Return samples of the given (prompt, response) lengths."""
    return [sample(i, prompt_length=p, response_length=r, seed=seed) for i, (p, r) in enumerate(lengths)]


def batch(of: list[TrainSample], *, num_steps: int = 1) -> TrainBatch:
    """Return a batch whose optimizer steps are consecutive ranges of the samples."""
    bounds = [len(of) * step // num_steps for step in range(num_steps + 1)]
    steps = [list(range(start, end)) for start, end in pairwise(bounds)]
    return TrainBatch(samples=of, steps=steps, num_rollouts_per_step=[len(step) for step in steps])


def with_old_logprobs(of: list[TrainSample], *, noise: float, logprobs: Sequence[np.ndarray], seed: int = 0) -> list[TrainSample]:
    """Set old log-probabilities near the given ones, so that ratios are near 1 and some are clipped."""
    rng = np.random.default_rng(seed)
    return [
        replace(s, old_logprobs=(lp + noise * rng.standard_normal(len(lp))).astype(np.float32)) for s, lp in zip(of, logprobs, strict=True)
    ]


def with_returns(of: list[TrainSample], *, noise: float, seed: int = 0) -> list[TrainSample]:
    """Set old values near the given ones and returns near those, so that some values are clipped."""
    rng = np.random.default_rng(seed)
    changed: list[TrainSample] = []
    for s in of:
        assert s.values is not None
        old, returns = (s.values + noise * rng.standard_normal(s.response_length).astype(np.float32) for _ in range(2))
        changed.append(replace(s, values=old, returns=returns))
    return changed
