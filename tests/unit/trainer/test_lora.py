"""LoRA on the torch trainer: equal to PEFT, resumed exactly, saved for PEFT, and synced as trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import ADAPTER, AdapterConfig
from fuligo.models.adapter import adapter_tensors, add_adapter, lora_layers, read_adapter_weights, write_adapter_weights
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.lora import AdaptedModel
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainSample
from tests import shares, tiny, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 4)]
LORA = LoraSettings(AdapterConfig(rank=4, alpha=8.0))


@pytest.fixture
def settings(checkpoint) -> TorchTrainerSettings:
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-2))
    return TorchTrainerSettings(
        hf_checkpoint=checkpoint, initial_weights=checkpoint, reference_weights=checkpoint, optimizer=optimizer, lora=LORA
    )


def worker_of(settings: TorchTrainerSettings) -> TorchRankWorker:
    return TorchRankWorker(settings, World())


def train(worker: TorchRankWorker, seed: int = 0) -> dict[str, float]:
    samples = shares.scored(worker, train_batches.samples(LENGTHS, seed=seed))
    metrics = worker.train(shares.to_train(worker, train_batches.batch(samples, num_steps=2))).metrics
    return {name: value for name, value in metrics.items() if name != "train/tokens_per_s"}


def logprobs_of(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    """Return [R] log-probabilities computed by the model's forward pass."""
    ids = torch.from_numpy(sample.tokens).long()
    logits = model(input_ids=ids[None]).logits[0, sample.prompt_length - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[sample.prompt_length :, None])[:, 0]


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_log_probabilities_and_gradients_are_those_of_peft(settings, checkpoint, tmp_path, rank_stabilised: bool) -> None:
    lora = LoraSettings(AdapterConfig(4, 8.0, ("q_proj", "down_proj"), rank_stabilised=rank_stabilised))
    worker = worker_of(replace(settings, lora=lora, loss=LossSettings(loss_type="sft_loss", per_token=True)))
    train(worker)
    worker.save(tmp_path)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / ADAPTER, is_trainable=True)
    samples = train_batches.samples(LENGTHS, seed=1)
    for ours, sample in zip(worker.logprobs(shares.to_score(worker, samples)), samples, strict=True):
        np.testing.assert_allclose(ours, logprobs_of(theirs, sample).detach().numpy(), atol=1e-5)
    worker._learner.optimizer.zero_grad()
    worker.gradients(shares.to_train(worker, train_batches.batch(samples))[0])
    masks = [torch.from_numpy(sample.loss_mask).float() for sample in samples]
    loss = -sum((logprobs_of(theirs, sample) * mask).sum() for sample, mask in zip(samples, masks)) / sum(mask.sum() for mask in masks)
    loss.backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in adapter_tensors(worker.policy.model).items()}
    assert ours.keys() == expected.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_the_base_has_neither_gradient_nor_optimizer_state_and_stays(settings) -> None:
    worker = worker_of(settings)
    adapter = set(adapter_tensors(worker.policy.model).values())
    before = {name: p.clone() for name, p in worker.policy.model.named_parameters() if p not in adapter}
    train(worker)
    for name, parameter in worker.policy.model.named_parameters():
        if parameter not in adapter:
            assert parameter.grad is None
            assert torch.equal(parameter, before[name]), name
    assert set(worker._learner.optimizer.state) == adapter
    assert len(lora_layers(worker.policy.model)) == 2 * 7  # every projection of both layers


def test_the_reference_is_the_policy_without_its_adapter(settings, checkpoint) -> None:
    worker = worker_of(replace(settings, loss=LossSettings(kl_loss=KlLoss(0.1, "k2"))))
    full = worker_of(replace(settings, lora=None))
    assert worker.reference is None
    train(worker)
    samples = train_batches.samples(LENGTHS, seed=1)
    scored, expected = (shares.scored(each, samples) for each in (worker, full))
    for ours, theirs in zip(scored, expected, strict=True):
        np.testing.assert_allclose(ours.ref_logprobs, theirs.ref_logprobs, atol=1e-6)
    current = worker.logprobs(shares.to_score(worker, samples))
    assert max(np.abs(ours - sample.ref_logprobs).max() for ours, sample in zip(current, scored)) > 1e-3
    assert train(worker)["train/kl"] > 0


def test_training_resumes_bit_for_bit(settings, tmp_path) -> None:
    uninterrupted = worker_of(settings)
    train(uninterrupted)
    uninterrupted.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["adapter", "optimizer", "rng", "trainer.json"]
    resumed = worker_of(replace(settings, seed=77))
    resumed.restore(tmp_path / "saved")
    assert train(resumed, seed=1) == train(uninterrupted, seed=1)
    for (name, ours), (_, theirs) in zip(resumed.named_weights(), uninterrupted.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_save_that_cannot_write_the_adapter_ends_as_other_failed_saves(settings, tmp_path) -> None:
    """In the background, too."""
    worker = worker_of(settings)
    for save in (worker.save, lambda directory: worker.begin_save(directory).result(timeout=60)):
        (tmp_path / "saved" / ADAPTER / "adapter_config.json").mkdir(parents=True, exist_ok=True)  # in the way
        with pytest.raises(CheckpointError, match=r"cannot write .*adapter_config\.json"):
            save(tmp_path / "saved")


def test_an_adapter_of_other_weights_is_refused(settings, reference_checkpoint, tmp_path) -> None:
    worker_of(settings).save(tmp_path / "saved")
    other = replace(settings, initial_weights=reference_checkpoint, reference_weights=reference_checkpoint)
    with pytest.raises(CheckpointError, match="trained on weights that differ"):
        worker_of(other).restore(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="it holds an adapter"):
        worker_of(replace(settings, lora=None)).restore(tmp_path / "saved")
    stronger = LoraSettings(replace(LORA.adapter, alpha=2 * LORA.adapter.alpha))
    with pytest.raises(CheckpointError, match=f"use --lora-alpha {LORA.adapter.alpha:g} without --lora-use-rslora"):
        worker_of(replace(settings, lora=stronger)).restore(tmp_path / "saved")


def test_training_starts_from_an_adapter_that_peft_saved(settings, checkpoint, tmp_path) -> None:
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), LoraConfig(r=2, lora_alpha=5, target_modules=["v_proj"]))
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    worker = worker_of(replace(settings, lora=LoraSettings(AdapterConfig.read(tmp_path), initial_adapter=tmp_path)))
    samples = train_batches.samples(LENGTHS)
    for ours, sample in zip(worker.logprobs(shares.to_score(worker, samples)), samples, strict=True):
        np.testing.assert_allclose(ours, logprobs_of(theirs, sample).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_adapter_with_a_value_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    write_adapter_weights({"sound": torch.ones(3), "damaged": torch.tensor([1.0, value])}, tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot load .*adapter_model.safetensors: damaged has values that are NaN or infinite"):
        read_adapter_weights(tmp_path)


def test_merged_weights_are_those_that_peft_merges(settings, checkpoint, tmp_path: Path) -> None:
    worker = worker_of(settings)
    train(worker)
    worker.save(tmp_path)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / ADAPTER).merge_and_unload().state_dict()
    for name, tensor in worker.named_weights():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-7)


def test_what_rounding_leaves_of_a_merge_is_counted(settings) -> None:
    worker = worker_of(settings)
    weights = AdaptedModel(worker.policy.model, torch.bfloat16)
    list(weights.merged())
    assert weights.rounding.num_elements == 0  # B is zero: there is no update yet
    for layer in lora_layers(worker.policy.model).values():
        torch.nn.init.constant_(layer.lora_B["default"].weight, 1e-7)
    list(weights.merged())
    assert 0 < weights.rounding.share_changed < 0.05


def test_dropout_applies_only_in_passes_with_gradients(settings) -> None:
    lora = LoraSettings(replace(LORA.adapter, dropout=0.5))
    worker = worker_of(replace(settings, lora=lora, loss=LossSettings(loss_type="sft_loss"), gradient_checkpointing=True))
    train(worker)
    samples = train_batches.samples(LENGTHS)
    once, again = (np.concatenate(worker.logprobs(shares.to_score(worker, samples))) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    step = shares.to_train(worker, train_batches.batch(samples))[0]
    first, second = (worker.gradients(step).losses for _ in range(2))
    assert not torch.equal(first, second)


def test_an_unknown_layer_is_named_with_the_closest(settings) -> None:
    with pytest.raises(ConfigError, match=r"target module q_prj: .* did you mean q_proj\?"):
        worker_of(replace(settings, lora=LoraSettings(AdapterConfig(4, 8.0, ("q_prj",)))))


def test_a_rank_that_no_matrix_has_is_refused(settings) -> None:
    """The output layer (400 rows here) is not adapted, so it does not raise the limit of the rank."""
    for rank in (10**9, 300):
        with pytest.raises(ConfigError, match=f"rank {rank} exceeds the 128 inputs or outputs of the widest layer"):
            worker_of(replace(settings, lora=LoraSettings(AdapterConfig(rank, 8.0))))


def test_dense_layers_and_shared_experts_of_a_mixture_are_adapted_and_its_experts_are_not() -> None:
    model: Any = tiny.model("glm4_moe")
    add_adapter(model, AdapterConfig(rank=2, alpha=4.0, target_modules=("down_proj",)), seed=0)
    adapted = {name.removeprefix("base_model.model.model.layers.").rpartition(".lora_")[0] for name in adapter_tensors(model)}
    assert adapted == {"0.mlp.down_proj", "1.mlp.shared_experts.down_proj"}


@pytest.mark.long
@pytest.mark.usefixtures("warm_children")
async def test_two_ranks_train_as_one(settings) -> None:
    samples = train_batches.samples([*LENGTHS, (3, 7), (2, 8)])
    results = {}
    for num_ranks in (1, 2):
        trainer = LocalTrainer(replace(settings, num_ranks=num_ranks, reference_weights=None))
        await trainer.load()
        for _ in range(2):
            result = await trainer.train(train_batches.batch(samples))
        results[num_ranks] = result
        await trainer.close()
    one, two = results[1], results[2]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5), name
    for position, score in one.scores.items():
        np.testing.assert_allclose(two.scores[position].logprobs, score.logprobs, atol=1e-5)
