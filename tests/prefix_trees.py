"""Samples that share prefixes of several depths, for tests of trainers."""

from dataclasses import replace

import numpy as np

from fuligo.types import TrainSample
from tests import train_batches


def tree_samples() -> list[TrainSample]:
    """Return two groups with a prompt each, an episode of three turns that branches, a repeated sample, and a sample alone."""
    first, second = (train_batches.sample(0, prompt_length=n, response_length=0, seed=n).tokens for n in (21, 40))
    plain = [begun(i, prompt, num_new=3 + 4 * i, prompt_length=len(prompt)) for prompt in (first, second) for i in range(4)]
    turn = plain[3].tokens
    episode = [begun(10 + i, turn, num_new=5 + i, prompt_length=len(first)) for i in range(3)]
    longer = begun(20, episode[0].tokens, num_new=9, prompt_length=len(first))
    alone = train_batches.sample(30, prompt_length=4, response_length=12)
    samples = [*plain, *episode, longer, replace(plain[1]), alone]
    return [replace(sample, index=i) for i, sample in enumerate(samples)]


def begun(index: int, tokens: np.ndarray, *, num_new: int, prompt_length: int) -> TrainSample:
    """Return a sample that begins with `tokens` and goes on at random; some tokens of its response are masked."""
    length = len(tokens) + num_new - prompt_length
    sample = train_batches.sample(index, prompt_length=prompt_length, response_length=length, seed=len(tokens))
    return replace(sample, tokens=np.concatenate([tokens, sample.tokens[-num_new:]]))
