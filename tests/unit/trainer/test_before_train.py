"""Batches and samples that --before-train-step-path and --rollout-data-postprocess-path may leave, and those that are refused."""

from collections.abc import Callable

import numpy as np
import pytest

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.trainer.samples import BeforeTrainStep, DataPostProcess
from fuligo.types import TrainBatch, TrainSample
from tests.random_samples import random_samples


def run(change: Callable[[TrainBatch], object], num_replicas: int = 2) -> TrainBatch:
    """Run the hook on twelve samples in three steps of four."""
    batch = assign_advantages(random_samples(0), AdvantageSettings(samples_per_step=4, num_steps=3))
    BeforeTrainStep(lambda rollout_id, batch: change(batch), num_replicas)(0, batch)
    return batch


def keep(batch: TrainBatch, num_samples: int) -> None:
    """Keep the first samples, with their steps."""
    del batch.samples[num_samples:]
    batch.steps = [kept for step in batch.steps if (kept := [position for position in step if position < num_samples])]
    batch.num_rollouts_per_step = [len(step) for step in batch.steps]


def test_a_hook_may_read_mask_and_shorten_a_batch() -> None:
    assert len(run(lambda batch: print(len(batch.samples))).samples) == 12
    assert not run(lambda batch: batch.samples[0].loss_mask.fill(0)).samples[0].loss_mask.any()
    assert run(lambda batch: keep(batch, 6)).steps == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda batch: batch.samples.clear(), r"it has no samples \(12 before the hook\); to leave a sample out, set its loss_mask to 0"),
        (lambda batch: batch.samples.pop(), r"its steps must name each sample \(11 in all, 12 before the hook\) exactly once"),
        (lambda batch: batch.steps.pop(), r"its steps must name each sample \(12 in all, 12 before the hook\) exactly once"),
        (lambda batch: batch.num_rollouts_per_step.pop(), r"num_rollouts_per_step is \[4, 4\] for 3 steps"),
        (
            lambda batch: keep(batch, 5),
            "a step has 1 sample, fewer than the 2 data-parallel ranks, which need one each; set the loss_mask",
        ),
        (
            lambda batch: setattr(batch.samples[3], "advantages", np.zeros(99)),
            r"sample 3 has \d response tokens, but the shape of its advantages is",
        ),
    ],
)
def test_a_batch_that_cannot_be_trained_on_names_the_hook(change: Callable[[TrainBatch], object], text: str) -> None:
    with pytest.raises(TrainerError, match=f"--before-train-step-path left a batch that cannot be trained on: {text}"):
        run(change)


def test_steps_that_were_small_before_the_hook_are_accepted() -> None:
    run(lambda batch: None, num_replicas=8)


def test_a_mask_that_the_post_processing_changes_changes_the_mean_of_its_response() -> None:
    samples = random_samples(0)
    groups: list[int] = []

    def mask_first_token(given: list[list[TrainSample]]) -> None:
        groups.extend(len(group) for group in given)
        for sample in given[0]:
            sample.loss_mask = np.ones_like(sample.loss_mask)
            sample.loss_mask[0] = 0

    DataPostProcess(mask_first_token)(samples)
    first = [sample for sample in samples if sample.group_index == samples[0].group_index]
    assert sum(groups) == len(samples)
    assert groups[0] == len(first)
    assert [sample.mask_sum for sample in first] == [sample.response_length - 1 for sample in first]


def test_post_processing_that_breaks_a_sample_is_named() -> None:
    with pytest.raises(TrainerError, match=r"--rollout-data-postprocess-path left samples that cannot be trained on: sample \d+ has"):
        DataPostProcess(lambda groups: setattr(groups[0][0], "loss_mask", np.ones(99, np.int8)))(random_samples(0))
