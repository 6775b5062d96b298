"""A step with shared prefixes equals the step without them: log-probabilities, losses, metrics and gradients in float32."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.off_policy import Correction
from fuligo.errors import TrainerError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainBatch
from tests import shares, tiny, train_batches
from tests.float64 import in_float64
from tests.prefix_trees import tree_samples

OPTIMIZER = OptimizerSettings(LearningRateSchedule(peak=1e-3))
LOSSES = {
    **{name: LossSettings(estimator=name) for name in ESTIMATORS},
    "all terms": LossSettings(
        entropy_coef=0.01, kl_loss=KlLoss(0.1, "low_var_kl"), correction=Correction("truncate", 0.0, 2.0), opsm_delta=0.01
    ),
    "per token": LossSettings(per_token=True),
    "sft": LossSettings(loss_type="sft_loss"),
    "custom": LossSettings(
        loss_type="custom_loss", custom_loss=lambda batch, logprobs: (-(batch.weights * logprobs).sum(), {"seen": batch.loss_mask.sum()})
    ),
}


def make_worker(checkpoint: Path, **given: object) -> TorchRankWorker:
    return TorchRankWorker(TorchTrainerSettings(checkpoint, checkpoint, OPTIMIZER, **given), World())


@pytest.fixture(scope="module")
def worker(checkpoint, reference_checkpoint) -> TorchRankWorker:
    critic = CriticSettings(reference_checkpoint, OPTIMIZER)
    return make_worker(checkpoint, reference_weights=reference_checkpoint, critic=critic, needs_old_logprobs=True)


def prepared(worker: TorchRankWorker) -> TrainBatch:
    """Return a batch of scored samples, with ratios and values on both sides of their clips."""
    samples = shares.scored(worker, tree_samples())
    assert samples is not None
    if samples[0].old_logprobs is not None:
        samples = train_batches.with_old_logprobs(samples, noise=0.3, logprobs=[s.old_logprobs for s in samples])
    if samples[0].values is not None:
        samples = train_batches.with_returns(samples, noise=0.3)
    return train_batches.batch(samples)


def share(worker: TorchRankWorker, shares_prefixes: bool, **given: object) -> None:
    worker.settings = replace(worker.settings, shares_prefixes=shares_prefixes, **given)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], noise: float = 2e-6) -> None:
    """Compare gradients; `noise` is that of float32 sums in another order, relative to the largest gradient."""
    largest = max(g.abs().max() for g in want.values())
    assert largest > 0
    assert max((got[name] - want[name]).abs().max() for name in want) <= noise * largest


def with_and_without(worker: TorchRankWorker, compute: Callable[[], torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of `compute`'s model, with shared prefixes and without."""
    found: list[dict[str, torch.Tensor]] = []
    for shares_prefixes in (True, False):
        share(worker, shares_prefixes)
        worker._learner.optimizer.zero_grad()
        model = compute()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


CAPACITIES = [Capacity(), Capacity(max_tokens=90), Capacity(max_samples=3)]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
def test_scores_are_those_of_separate_samples(worker, capacity):
    samples = tree_samples()
    share(worker, True, score_capacity=capacity)
    plans = shares.to_score(worker, samples).schedule.plans
    assert any(any(plan.shared) for plan in plans)
    got = shares.scored(worker, samples)
    share(worker, False, score_capacity=capacity)
    for mine, reference in zip(got, shares.scored(worker, samples), strict=True):
        for name in ("old_logprobs", "ref_logprobs", "values"):
            np.testing.assert_allclose(getattr(mine, name), getattr(reference, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "capacity"),
    [
        # a loss does not know of rows: each is tested with one way to pack, and each way with two losses
        pytest.param(loss, capacity, id=f"{capacity}-{name}", marks=[] if number == 1 or name in ("grpo", "all terms") else [SLOW])
        for name, loss in LOSSES.items()
        for number, capacity in enumerate(CAPACITIES)
    ],
)
def test_gradients_and_metrics_are_those_of_separate_samples(worker, loss, capacity):
    share(worker, False, loss=loss, capacity=capacity)
    batch = prepared(worker)
    metrics: list[dict[str, float]] = []

    def compute() -> torch.nn.Module:
        gradients = worker.gradients(shares.to_train(worker, batch)[0])
        assert bool(gradients.num_shared_tokens) == worker.settings.shares_prefixes
        assert gradients.num_tokens == sum(len(sample.tokens) - 1 for sample in batch.samples)
        metrics.append(gradients.sums.means())
        return worker.policy.model

    assert_same(*with_and_without(worker, compute))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("is_float64", "noise"), [(True, 1e-10), (False, 2e-4)], ids=["float64", "float32"])
def test_gradients_that_cancel_are_those_of_separate_samples(checkpoint, is_float64, noise):
    """A repeated answer with opposite advantages, as in a random tree whose gradients differed by 7e-5 of the largest.

    Only the ratios differ, by 1%, so a hundredth of each answer's gradient is left, but all of its float32 rounding: 2e-6 of the gradient
    before it cancels is 2e-4 of what is left. In float64 the gradients agree.
    """
    worker = make_worker(checkpoint, loss=LOSSES["gspo"], capacity=Capacity(max_samples=2), needs_old_logprobs=True)
    answer = train_batches.sample(0, prompt_length=20, response_length=10, seed=2)
    first, second = (replace(answer, index=i, advantages=np.full(10, sign, np.float32)) for i, sign in enumerate((1, -1)))
    scored = shares.scored(worker, [first, second])
    batch = train_batches.batch([scored[0], replace(scored[1], old_logprobs=scored[1].old_logprobs - np.float32(0.01))])

    def compute() -> torch.nn.Module:
        gradients = worker.gradients(shares.to_train(worker, batch)[0])
        assert bool(gradients.num_shared_tokens) == worker.settings.shares_prefixes
        return worker.policy.model

    with in_float64(worker.policy.model) if is_float64 else nullcontext():
        found, expected = with_and_without(worker, compute)
    assert_same(found, expected, noise=noise)


def test_value_gradients_are_those_of_separate_samples(worker):
    share(worker, False, loss=LOSSES["ppo"], capacity=Capacity(max_tokens=90))
    batch = prepared(worker)

    def compute() -> torch.nn.Module:
        worker.critic.learner.optimizer.zero_grad()
        worker.critic.gradients(shares.to_train(worker, batch)[0])
        return worker.critic.value_model.model

    assert_same(*with_and_without(worker, compute))


MODELS = {
    "sliding window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}),
    "llama": ("llama", {}),
    "glm4": ("glm4", {}),
    "experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
}


@pytest.mark.parametrize(("family", "overrides"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["", "checkpointing"])
def test_gradients_of_other_models_are_those_of_separate_samples(tmp_path, family, overrides, gradient_checkpointing):
    directory = tiny.save_checkpoint(tmp_path, family, initializer_range=0.05, **overrides)
    worker = make_worker(directory, gradient_checkpointing=gradient_checkpointing)
    batch = prepared(worker)

    def compute() -> torch.nn.Module:
        worker.gradients(shares.to_train(worker, batch)[0])
        return worker.policy.model

    assert_same(*with_and_without(worker, compute), noise=1e-5)


def test_gradients_of_an_adapter_are_those_of_separate_samples(checkpoint):
    worker = make_worker(checkpoint, reference_weights=checkpoint, lora=LoraSettings(AdapterConfig(rank=4, alpha=8.0)))
    batch = prepared(worker)

    def compute() -> torch.nn.Module:
        worker.gradients(shares.to_train(worker, batch)[0])
        return worker.policy.model

    assert_same(*with_and_without(worker, compute))


def test_loading_compares_a_row_of_shared_prefixes_with_the_model_itself(checkpoint, monkeypatch):
    monkeypatch.setattr("fuligo.trainer.torch_backend.packed_attention.tree_attention", lambda query, key, value, tree, **_: query)
    with pytest.raises(TrainerError, match="log-probabilities of packed sequences differ"):
        make_worker(checkpoint, shares_prefixes=True)
