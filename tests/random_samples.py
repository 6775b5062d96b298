"""Random train samples and loss inputs, for tests of algorithms and objectives."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fuligo.trainer.objective import LossInputs
from fuligo.types import FloatArray, TrainSample


def train_sample(
    index: int, group_index: int, *, reward: float = 0.0, loss_mask: Sequence[int] = (1, 1, 1), rng: np.random.Generator | None = None
) -> TrainSample:
    """Return a sample with a prompt of two tokens; its log-probabilities are random with a generator, else 0."""
    length = len(loss_mask)

    def logprobs(spread: float) -> FloatArray:
        return np.zeros(length, np.float32) if rng is None else (-1 + spread * rng.standard_normal(length)).astype(np.float32)

    old = logprobs(0.3)
    return TrainSample(
        index=index,
        group_index=group_index,
        tokens=np.arange(2 + length, dtype=np.int32),
        prompt_length=2,
        loss_mask=np.array(loss_mask, np.int8),
        reward=reward,
        engine_logprobs=old + (logprobs(0.2) + 1 if rng is not None else 0),
        versions=np.zeros(length, np.int32),
        mask_sum=float(sum(loss_mask)),
        old_logprobs=old,
        ref_logprobs=logprobs(0.3),
        values=old + 1,
    )


def random_samples(seed: int, *, num_groups: int = 3, group_size: int = 4, max_length: int = 9) -> list[TrainSample]:
    """Return groups of samples of mixed lengths and rewards; about one token in five is masked."""
    rng = np.random.default_rng(seed)
    return [
        train_sample(
            index,
            index // group_size,
            reward=float(rng.normal()),
            loss_mask=(rng.random(rng.integers(1, max_length + 1)) < 0.8).astype(int).tolist(),
            rng=rng,
        )
        for index in range(num_groups * group_size)
    ]


def entropy_stand_in(logprobs: Tensor) -> Tensor:
    """Return a differentiable function of the log-probabilities, in place of the entropy, which needs the whole vocabulary."""
    return -logprobs * logprobs.exp()


def loss_inputs(samples: Sequence[TrainSample], logprobs: Sequence[Tensor], weights: Sequence[FloatArray]) -> LossInputs:
    """Lay samples end to end.

    Args:
        logprobs: [R] of each sample, of the policy that is trained.
        weights: [R] of each sample.
    """

    def column(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.float32))

    return LossInputs(
        logprobs=torch.cat(list(logprobs)),
        entropy=entropy_stand_in(torch.cat(list(logprobs))),
        advantages=column([sample.advantages for sample in samples]),
        loss_mask=column([sample.loss_mask for sample in samples]),
        weights=column(list(weights)),
        sample_ids=torch.from_numpy(np.repeat(np.arange(len(samples)), [sample.response_length for sample in samples])),
        num_samples=len(samples),
        engine_logprobs=column([sample.engine_logprobs for sample in samples]),
        old_logprobs=column([sample.old_logprobs for sample in samples if sample.old_logprobs is not None]),
        ref_logprobs=column([sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None]),
    )
