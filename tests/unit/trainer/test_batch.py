"""Packed tokens and micro-batches, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fuligo.errors import TrainerError
from fuligo.trainer.batch import micro_batch, pack_tokens
from fuligo.types import TrainSample
from tests import train_batches

CPU = torch.device("cpu")


def sample(index: int, prompt: list[int], response: list[int]) -> TrainSample:
    template = train_batches.sample(index, prompt_length=len(prompt), response_length=len(response))
    return replace(template, tokens=np.array(prompt + response, np.int32))


def test_the_token_before_predicts_each_response_token_also_across_borders():
    """The last target is the end token."""
    packed = pack_tokens([sample(0, [10, 11, 12], [13, 14]), sample(1, [20], [21, 22, 2])], CPU)
    assert packed.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert packed.cu_seqlens == (0, 4, 7)
    assert packed.input_ids[packed.predicting_positions].tolist() == [12, 13, 20, 21, 22]
    assert packed.targets.tolist() == [13, 14, 21, 22, 2]
    assert packed.response_lengths == (2, 3)


def test_columns_are_those_of_the_samples():
    samples = [sample(0, [1, 2], [3, 4]), sample(1, [1], [5]), sample(2, [1], [6, 7, 8])]
    weights = [np.array([0.1, 0.2], np.float32), np.array([0.3], np.float32), np.array([0.4, 0.5, 0.6], np.float32)]
    batch = micro_batch(samples[1:], weights[1:], CPU)
    assert batch.tokens.targets.tolist() == [5, 6, 7, 8]
    assert batch.sample_ids.tolist() == [0, 1, 1, 1]
    np.testing.assert_array_equal(batch.weights, np.concatenate(weights[1:]))
    for column in ("advantages", "engine_logprobs", "loss_mask"):
        np.testing.assert_array_equal(getattr(batch, column), np.concatenate([getattr(samples[i], column) for i in (1, 2)]))
    assert batch.old_logprobs is batch.ref_logprobs is None


def test_a_repetition_has_neither_weight_nor_mask():
    samples = [sample(0, [1, 2], [3, 4])]
    batch = micro_batch(samples, [np.ones(2, np.float32)], CPU, counts=False)
    assert batch.weights.tolist() == batch.loss_mask.tolist() == [0, 0]


def test_a_response_without_a_token_before_it_is_refused():
    with pytest.raises(TrainerError, match="sample 7: it has no token before its response"):
        pack_tokens([sample(7, [], [1, 2])], CPU)
