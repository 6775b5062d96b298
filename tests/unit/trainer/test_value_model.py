"""The value model of the torch trainer: its values, its training and its checkpoints."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from fuligo.algorithms.assign import assign_advantages, step_denominators, token_weights
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.cli.convert import main as convert
from fuligo.errors import CheckpointError, TrainerError
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.critic import Critic
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainBatch, TrainSample
from tests import shares, tiny, train_batches
from tests.unit.trainer.conftest import SHAPE

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6)]
CLIP = 0.2


@pytest.fixture(scope="session")
def values_checkpoint(tmp_path_factory) -> Path:
    """Save a value model of the tests' architecture whose head is not zero."""
    return tiny.save_value_model(tmp_path_factory.mktemp("values"), "qwen3", seed=2, **SHAPE)


@pytest.fixture
def settings(checkpoint) -> TorchTrainerSettings:
    return TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
        critic=CriticSettings(checkpoint, OptimizerSettings(LearningRateSchedule(peak=3e-3)), clip=CLIP),
    )


def begun_with(settings: TorchTrainerSettings, directory: Path) -> TorchTrainerSettings:
    assert settings.critic is not None
    return replace(settings, critic=replace(settings.critic, initial_weights=directory))


def worker_of(settings: TorchTrainerSettings) -> TorchRankWorker:
    return TorchRankWorker(settings, World())


def critic_of(worker: TorchRankWorker) -> Critic:
    assert worker.critic is not None
    return worker.critic


def values_of(worker: TorchRankWorker, samples: list[TrainSample]) -> list[np.ndarray]:
    scored = shares.scored(worker, samples)
    assert scored is not None
    values = [sample.values for sample in scored]
    return [of_sample for of_sample in values if of_sample is not None]


def train(worker: TorchRankWorker, seed: int) -> dict[str, float]:
    """Train a rollout of two optimizer steps."""
    samples = shares.scored(worker, train_batches.samples(LENGTHS, seed=seed))
    assert samples is not None
    batch = assign_advantages(samples, AdvantageSettings(samples_per_step=4, num_steps=2, estimator="ppo"))
    metrics = worker.train(shares.to_train(worker, batch)).metrics
    return {name: value for name, value in metrics.items() if name != "train/tokens_per_s"}


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unequal(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)}


def test_the_first_values_are_zero(settings):
    worker, samples = worker_of(settings), train_batches.samples(LENGTHS)
    values = values_of(worker, samples)
    assert [len(of_sample) for of_sample in values] == [s.response_length for s in samples]
    assert not any(of_sample.any() for of_sample in values)


@pytest.mark.parametrize("capacity", [Capacity(max_samples=1), Capacity(max_tokens=30), Capacity()])
def test_values_are_the_heads_product_with_the_models_own_hidden_states(settings, values_checkpoint, capacity):
    """The oracle is transformers' forward pass of each sample; the value of a token is that of the state before it."""
    worker, samples = worker_of(replace(begun_with(settings, values_checkpoint), score_capacity=capacity)), train_batches.samples(LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(values_checkpoint, ignore_mismatched_sizes=True)
    (head,) = load_file(values_checkpoint / "model.safetensors")["lm_head.weight"]
    with torch.no_grad():
        for sample, got in zip(samples, values_of(worker, samples), strict=True):
            hidden = model.base_model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).last_hidden_state[0]
            np.testing.assert_allclose(got, (hidden @ head)[sample.prompt_length - 1 : -1].numpy(), atol=1e-5)


@pytest.fixture
def batch(settings, values_checkpoint) -> TrainBatch:
    """Return values on both sides of the clip; the third sample is fully masked."""
    samples = shares.scored(worker_of(begun_with(settings, values_checkpoint)), train_batches.samples(LENGTHS))
    assert samples is not None
    samples = train_batches.with_returns(samples, noise=CLIP)
    samples[2] = replace(samples[2], loss_mask=np.zeros_like(samples[2].loss_mask), mask_sum=0.0)
    return train_batches.batch(samples)


def gradient(worker: TorchRankWorker, batch: TrainBatch) -> dict[str, torch.Tensor]:
    critic = critic_of(worker)
    critic.learner.optimizer.zero_grad()
    critic.gradients(shares.to_train(worker, batch)[0])
    return {name: p.grad.clone() for name, p in critic.value_model.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("capacity", [Capacity(max_samples=1), Capacity(max_samples=3), Capacity(max_tokens=30)])
def test_gradient_is_that_of_the_clipped_squares_however_the_step_is_packed(settings, values_checkpoint, batch, capacity):
    worker = worker_of(replace(begun_with(settings, values_checkpoint), capacity=capacity))
    got = gradient(worker, batch)
    value_model, denominators = critic_of(worker).value_model, step_denominators(batch, 0)
    critic_of(worker).learner.optimizer.zero_grad()
    for sample in batch.samples:
        hidden = value_model.model.base_model(
            input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None],
            position_ids=torch.arange(len(sample.tokens))[None],
            packed_cu_seqlens=(0, len(sample.tokens)),
        ).last_hidden_state[0]
        values = (hidden @ value_model.model.get_output_embeddings().weight[0])[sample.prompt_length - 1 : -1]
        old, returns = torch.from_numpy(sample.values), torch.from_numpy(sample.returns)
        clipped = old + (values - old).clamp(-CLIP, CLIP)
        weights = torch.from_numpy(token_weights(sample, denominators, per_token=False))
        (weights * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)).sum().backward()
    want = {name: p.grad for name, p in value_model.model.named_parameters()}
    largest = max(g.abs().max() for g in want.values())
    assert got.keys() == want.keys()
    assert largest > 0
    assert max((got[name] - want[name]).abs().max() for name in want) <= 2e-6 * largest


def test_values_at_masked_tokens_reach_neither_gradient_nor_metrics(settings, values_checkpoint, batch):
    worker = worker_of(begun_with(settings, values_checkpoint))
    want = gradient(worker, batch)
    for sample in batch.samples:
        for column in (sample.values, sample.returns):
            column[sample.loss_mask == 0] = np.nan
    got = gradient(worker, batch)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_value_model_learns_the_returns(settings):
    worker, samples = worker_of(settings), train_batches.samples(LENGTHS)
    losses = []
    for _ in range(15):
        scored = shares.scored(worker, samples)
        batch = assign_advantages(scored, AdvantageSettings(samples_per_step=7, estimator="ppo"))
        losses.append(worker.train(shares.to_train(worker, batch)).metrics["train/value_loss"])
    assert losses[-1] < 0.2 * losses[0]


def test_at_first_only_the_value_model_learns_then_both(settings):
    worker = worker_of(replace(settings, critic=replace(settings.critic, num_only_rollouts=2)))
    policy, values = worker.policy.model, critic_of(worker).value_model.model
    for seed in range(2):
        before, values_before = copied(policy), copied(values)
        metrics = train(worker, seed)
        assert not unequal(before, policy)
        assert unequal(values_before, values)
        assert metrics.keys() == {"train/value_loss", "train/value_clip_fraction", "train/critic_lr", "train/critic_grad_norm"}
    assert worker.progress.num_optimizer_steps == 0, "the policy's schedule begins when it learns"
    before = copied(policy)
    metrics = train(worker, 2)
    assert unequal(before, policy) == before.keys()
    assert {"train/pg_loss", "train/lr", "train/value_loss", "train/critic_lr"} <= metrics.keys()


def test_training_resumes_bit_for_bit(settings, tmp_path):
    settings = replace(settings, critic=replace(settings.critic, num_only_rollouts=2))
    uninterrupted = worker_of(settings)
    train(uninterrupted, seed=0)
    uninterrupted.save(tmp_path)
    resumed = worker_of(settings)
    resumed.restore(tmp_path)
    for seed in (1, 2):
        assert train(resumed, seed) == train(uninterrupted, seed)
    for ours, theirs in ((resumed.policy, uninterrupted.policy), (critic_of(resumed).value_model, critic_of(uninterrupted).value_model)):
        assert not unequal(copied(ours.model), theirs.model)


def test_a_saved_value_model_is_where_another_begins(settings, tmp_path):
    worker, samples = worker_of(settings), train_batches.samples(LENGTHS)
    train(worker, seed=0)
    worker.save(tmp_path)
    for ours, theirs in zip(
        values_of(worker, samples), values_of(worker_of(begun_with(settings, tmp_path / "critic")), samples), strict=True
    ):
        assert ours.any()
        np.testing.assert_array_equal(ours, theirs)


def test_transformers_loads_what_was_saved(settings, tmp_path):
    """Load it as a token classifier: its logit at a token is the value of the token after it."""
    worker, samples = worker_of(settings), train_batches.samples(LENGTHS)
    train(worker, seed=0)
    worker.save(tmp_path / "saved")
    assert convert(["value-to-hf", str(tmp_path / "saved"), "--save", str(tmp_path / "export")]) == 0
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "export")
    for sample, values in zip(samples, values_of(worker, samples), strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0, :, 0]
        assert values.any()
        np.testing.assert_allclose(logits[sample.prompt_length - 1 : -1], values, atol=1e-5)


def test_a_checkpoint_without_a_value_model_is_refused_unless_one_is_to_begin_there(settings, values_checkpoint, tmp_path):
    without = worker_of(replace(settings, critic=None))
    without.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no value model.*set its initial weights with --critic-load"):
        worker_of(settings).restore(tmp_path)
    settings = begun_with(settings, values_checkpoint)
    worker = worker_of(replace(settings, critic=replace(settings.critic, may_begin_at_resume=True)))
    begun = copied(critic_of(worker).value_model.model)
    worker.restore(tmp_path)
    assert not unequal(begun, critic_of(worker).value_model.model)


@pytest.mark.parametrize("damaged", ["critic/model-00000.safetensors", "critic_optimizer/optimizer-00000.safetensors"])
def test_a_damaged_value_model_is_named_before_anything_changes(settings, tmp_path, damaged):
    worker = worker_of(settings)
    train(worker, seed=0)
    worker.save(tmp_path)
    (tmp_path / damaged).write_bytes(b"")
    fresh = worker_of(settings)
    before = copied(fresh.policy.model)
    with pytest.raises(CheckpointError, match=damaged):
        fresh.restore(tmp_path)
    assert not unequal(before, fresh.policy.model)


def test_another_architecture_is_refused(settings, tmp_path):
    other = tiny.save_checkpoint(tmp_path, "qwen3", **{**SHAPE, "layers": 1})
    with pytest.raises(CheckpointError, match=r"must have the policy's architecture, but model\.layers\.1.* is absent there"):
        worker_of(begun_with(settings, other))


def test_a_value_loss_that_is_not_finite_names_its_model_and_leaves_the_weights(settings, batch):
    worker = worker_of(settings)
    before = copied(critic_of(worker).value_model.model)
    batch.samples[0].returns[-1] = np.inf
    with pytest.raises(TrainerError, match=r"optimizer step 0 of the value model: .* not finite.*smaller --critic-lr"):
        worker.train(shares.to_train(worker, batch))
    assert not unequal(before, critic_of(worker).value_model.model)
