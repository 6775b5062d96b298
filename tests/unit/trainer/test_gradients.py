"""The gradient of a step's loss does not depend on packing, splitting or order: max|dg| <= 1e-6 max|g| in float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fuligo.algorithms.off_policy import Correction
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity, MicroBatchPlan, MicroBatchSchedule
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import StepShare
from fuligo.trainer.step import StepSamples
from fuligo.trainer.torch_backend.learner import compute_gradients
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainBatch
from tests import shares, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2), (3, 40), (4, 9)]
LOSSES = {
    "grpo": LossSettings(entropy_coef=0.01, kl_loss=KlLoss(0.1, "low_var_kl"), correction=Correction("truncate", 0.0, 2.0)),
    "gspo": LossSettings(estimator="gspo"),
    "per-token": LossSettings(per_token=True),
    "sft": LossSettings(loss_type="sft_loss"),
}


@pytest.fixture(scope="module")
def worker(checkpoint, reference_checkpoint) -> TorchRankWorker:
    settings = TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        reference_weights=reference_checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
        needs_old_logprobs=True,
    )
    return TorchRankWorker(settings, World())


@pytest.fixture(scope="module")
def batch(worker) -> TrainBatch:
    """Return a step with ratios on both sides of the clip; its third sample is fully masked, its last two are parts of one rollout."""
    samples = shares.scored(worker, train_batches.samples(LENGTHS))
    samples = train_batches.with_old_logprobs(samples, noise=0.3, logprobs=[s.old_logprobs for s in samples])
    samples[2] = replace(samples[2], loss_mask=np.zeros_like(samples[2].loss_mask), mask_sum=0.0)
    shared = samples[-1].mask_sum + samples[-2].mask_sum
    samples[-2:] = [replace(s, index=samples[-1].index, mask_sum=shared) for s in samples[-2:]]
    return TrainBatch(samples, [list(range(len(samples)))], [len(samples) - 1])


def gradient(
    worker: TorchRankWorker, batch: TrainBatch, loss: LossSettings, capacity: Capacity, *, chunk_tokens: int = 4096
) -> dict[str, torch.Tensor]:
    worker.settings = replace(worker.settings, loss=loss, capacity=capacity)
    worker.policy.chunk_tokens = chunk_tokens
    worker._learner.optimizer.zero_grad()
    worker.gradients(shares.to_train(worker, batch)[0])
    return {name: p.grad.clone() for name, p in worker.policy.model.named_parameters()}


NOISE = 2e-6
"""Tolerance relative to the largest gradient; float32 sums in another order differ by 0.5e-6 to 1.2e-6, depending on the CPU's kernels."""


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    largest = max(g.abs().max() for g in want.values())
    assert largest > 0
    assert max((got[name] - want[name]).abs().max() for name in want) <= NOISE * largest


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("capacity", [Capacity(max_samples=1), Capacity(max_samples=3), Capacity(max_tokens=20), Capacity(max_tokens=45)])
def test_packing_and_number_of_micro_batches_do_not_change_the_gradient(worker, batch, loss, capacity):
    assert_same(gradient(worker, batch, loss, capacity), gradient(worker, batch, loss, Capacity()))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_order_of_samples_does_not_change_the_gradient(worker, batch, loss):
    order = np.random.default_rng(0).permutation(len(batch.samples)).tolist()
    shuffled = TrainBatch([batch.samples[i] for i in order], batch.steps, batch.num_rollouts_per_step)
    capacity = Capacity(max_tokens=30)
    assert_same(gradient(worker, shuffled, loss, capacity), gradient(worker, batch, loss, capacity))


def test_size_of_logit_chunks_does_not_change_the_gradient(worker, batch):
    loss = LOSSES["grpo"]
    assert_same(gradient(worker, batch, loss, Capacity(), chunk_tokens=7), gradient(worker, batch, loss, Capacity()))


def test_gradient_checkpointing_does_not_change_the_gradient(checkpoint, worker, batch):
    recomputing = TorchRankWorker(replace(worker.settings, reference_weights=None, gradient_checkpointing=True), World())
    assert_same(gradient(recomputing, batch, LOSSES["grpo"], Capacity()), gradient(worker, batch, LOSSES["grpo"], Capacity()))


def test_a_repeated_micro_batch_weighs_nothing(worker, batch):
    plans = [MicroBatchPlan(tuple(range(len(batch.samples))))]
    want = gradient(worker, batch, LOSSES["grpo"], Capacity())
    for padded in ([*plans, MicroBatchPlan((3,), counts=False)], [MicroBatchPlan((0, 8), counts=False), *plans]):
        worker._learner.optimizer.zero_grad()
        step = StepShare(StepSamples.of(batch, 0, LOSSES["grpo"]), MicroBatchSchedule(padded))
        result = compute_gradients(worker.policy, step, settings=LOSSES["grpo"], device=worker.world.device)
        assert_same({name: p.grad for name, p in worker.policy.model.named_parameters()}, want)
        assert result.num_tokens == sum(len(s.tokens) - 1 for s in batch.samples)
        assert sorted(result.scores) == list(range(len(batch.samples)))


def test_metrics_do_not_depend_on_packing_either(worker, batch):
    def metrics(capacity):
        worker.settings = replace(worker.settings, loss=LOSSES["grpo"], capacity=capacity)
        return worker.gradients(shares.to_train(worker, batch)[0]).sums.means()

    want = metrics(Capacity())
    assert {"loss", "pg_loss", "kl", "entropy", "clip_fraction", "logprob_abs_diff"} <= want.keys()
    assert 0 < want["clip_fraction"] < 1
    for name, value in metrics(Capacity(max_tokens=20)).items():
        assert value == pytest.approx(want[name], rel=1e-5, abs=1e-7), name


def test_masked_tokens_do_not_affect_the_loss(worker, batch):
    """Loss, KL and entropy ignore tokens outside the loss mask."""
    spoilt = [
        replace(s, advantages=np.where(s.loss_mask, s.advantages, 1e6), engine_logprobs=np.where(s.loss_mask, s.engine_logprobs, -50.0))
        for s in batch.samples
    ]
    assert_same(
        gradient(worker, replace(batch, samples=spoilt), LOSSES["grpo"], Capacity()), gradient(worker, batch, LOSSES["grpo"], Capacity())
    )


def test_a_micro_batch_without_any_response_token_still_joins(worker, batch):
    nothing = np.empty(0, np.float32)
    empty = replace(train_batches.sample(99, prompt_length=5, response_length=0), old_logprobs=nothing, ref_logprobs=nothing)
    joined = TrainBatch([*batch.samples, empty], [list(range(len(batch.samples) + 1))], batch.num_rollouts_per_step)
    assert_same(gradient(worker, joined, LOSSES["grpo"], Capacity(max_samples=1)), gradient(worker, batch, LOSSES["grpo"], Capacity()))
