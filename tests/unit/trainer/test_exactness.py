"""Check of --exact-on-policy on rollouts whose log-probabilities are known."""

from dataclasses import replace

import numpy as np
import pytest

from fuligo.errors import TrainerError
from fuligo.trainer.exactness import require_exact
from fuligo.types import StepResult, TokenScores, TrainBatch, TrainSample
from tests import train_batches

VERSION = 3


def rollout(*, num_steps: int = 1, has_old: bool = False) -> TrainBatch:
    """Return four samples of four trained tokens each, sampled by the current version."""
    samples = [
        replace(sample, loss_mask=np.ones(4, np.int8), versions=np.full(4, VERSION, np.int32))
        for sample in train_batches.samples([(2, 4)] * 4)
    ]
    if has_old:
        samples = [replace(sample, old_logprobs=sample.engine_logprobs.copy()) for sample in samples]
    return train_batches.batch(samples, num_steps=num_steps)


def trained(batch: TrainBatch) -> StepResult:
    """Return a result whose log-probabilities are the engine's."""
    scores = {i: TokenScores(sample.engine_logprobs.copy(), np.zeros(4, np.float32)) for i, sample in enumerate(batch.samples)}
    return StepResult({}, scores, num_tokens=24)


def next_float(values: np.ndarray, token: int) -> None:
    values[token] = np.nextafter(values[token], np.float32(0))


def test_equal_logprobs_pass() -> None:
    batch = rollout()
    require_exact(batch, trained(batch), VERSION)


def test_one_bit_fails_and_names_the_token() -> None:
    batch = rollout()
    result = trained(batch)
    next_float(result.scores[2].logprobs, 1)
    with pytest.raises(TrainerError, match=r"sample 2 \(prompt 1\), response token 1: the engine's .* 1 of 16 tokens of policy version 3"):
        require_exact(batch, result, VERSION)


def test_missing_numbers_fail() -> None:
    batch = rollout()
    result = trained(batch)
    result.scores[0].logprobs[0] = np.nan
    with pytest.raises(TrainerError, match="1 of 16"):
        require_exact(batch, result, VERSION)


def test_masked_tokens_and_older_versions_are_left_out() -> None:
    batch = rollout()
    result = trained(batch)
    next_float(result.scores[0].logprobs, 1)
    next_float(result.scores[1].logprobs, 2)
    batch.samples[0].loss_mask[1] = 0
    batch.samples[1].versions[2] = VERSION - 1
    require_exact(batch, result, VERSION)


def test_old_logprobs_are_compared_before_those_of_the_step() -> None:
    batch = rollout(num_steps=2, has_old=True)
    result = trained(batch)
    next_float(result.scores[3].logprobs, 1)  # the second step's, after the weights have moved
    require_exact(batch, result, VERSION)
    old: TrainSample = batch.samples[3]
    assert old.old_logprobs is not None
    next_float(old.old_logprobs, 0)
    with pytest.raises(TrainerError, match="sample 3"):
        require_exact(batch, result, VERSION)


def test_later_steps_are_not_compared_without_old_logprobs() -> None:
    batch = rollout(num_steps=2)
    result = trained(batch)
    next_float(result.scores[3].logprobs, 1)
    require_exact(batch, result, VERSION)
    next_float(result.scores[0].logprobs, 1)
    with pytest.raises(TrainerError, match="sample 0"):
        require_exact(batch, result, VERSION)


def test_rollouts_that_train_only_the_value_model_have_nothing_to_compare() -> None:
    require_exact(rollout(), StepResult({}, {}, num_tokens=24), VERSION)
