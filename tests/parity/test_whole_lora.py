"""LoRA of the language model in a published model with towers: equal to PEFT's on the published class, saved, resumed, merged."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER, ADAPTER_CONFIG, TOWER_MODULES, AdapterConfig
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.layout.adapter import AdapterShape
from fuligo.models.adapter import adapter_tensors, updates_of
from fuligo.models.registry import architecture_of, experts_in
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny_vision, train_batches
from tests.parity.test_whole_checkpoint import LENGTHS, is_of_tower, settings_of, tensors_of
from tests.unit.trainer.test_lora import logprobs_of

ATTENTION = AdapterConfig(rank=4, alpha=8.0, target_modules=("o_proj", "q_proj"))
ALL = AdapterConfig(rank=4, alpha=8.0)
WITH_EXPERTS = replace(ATTENTION, adapts_experts=True)


@pytest.fixture(scope="module", params=["mixture", "dense"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return tiny_vision.save_gemma4(directory, enable_moe_block=request.param == "mixture")


def worker_of(published: Path, adapter: AdapterConfig, **changes: Any) -> Any:
    return TorchRankWorker(settings_of(published, lora=LoraSettings(adapter), **changes), World())


def train(worker: TorchRankWorker, seed: int = 0) -> None:
    worker.train(shares.to_train(worker, train_batches.batch(train_batches.samples(LENGTHS, seed=seed))))


def whole_model(published: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(published, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("adapter", [ATTENTION, ALL, WITH_EXPERTS], ids=["attention", "all", "experts"])
def test_log_probabilities_and_gradients_are_those_of_peft(published: Path, tmp_path: Path, adapter: AdapterConfig) -> None:
    if adapter.adapts_experts and published.name.startswith("dense"):
        pytest.skip("no experts")
    worker = worker_of(published, adapter)
    train(worker)
    worker.save(tmp_path)
    theirs: Any = PeftModel.from_pretrained(whole_model(published), tmp_path / ADAPTER, is_trainable=True).eval()
    samples = train_batches.samples(LENGTHS, seed=1)
    for ours, sample in zip(worker.logprobs(shares.to_score(worker, samples)), samples, strict=True):
        np.testing.assert_allclose(ours, logprobs_of(theirs, sample).detach().numpy(), atol=1e-4)
    worker._learner.optimizer.zero_grad()
    worker.gradients(shares.to_train(worker, train_batches.batch(samples))[0])
    means = [
        (logprobs_of(theirs, sample) * torch.from_numpy(sample.loss_mask).float()).sum() / sample.loss_mask.sum() for sample in samples
    ]
    (-torch.stack(means).mean()).backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in adapter_tensors(worker.policy.model).items()}
    assert found.keys() == expected.keys() and found
    assert not any(re.search(r"tower|embed_(vision|audio)", name) for name in found)
    largest = max(grad.abs().max() for grad in expected.values())
    for name, grad in found.items():
        assert (grad - expected[name]).abs().max() <= 1e-5 * largest, name


def test_peft_adapts_the_towers_too_without_the_pattern(published: Path) -> None:
    """Or the pattern would be superfluous."""
    with pytest.raises(ValueError, match="ClippableLinear"):
        get_peft_model(whole_model(published), LoraConfig(target_modules=["q_proj"]))


def test_the_plan_counts_the_adapter(published: Path) -> None:
    worker = worker_of(published, ALL)
    planned = AdapterShape(ALL, architecture_of(json.loads((published / "config.json").read_text())))
    assert planned.num_parameters == sum(parameter.numel() for parameter in adapter_tensors(worker.policy.model).values())
    names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(worker.policy.model)}
    assert set(planned.names) == names


def test_training_resumes_bit_for_bit(published: Path, tmp_path: Path) -> None:
    uninterrupted = worker_of(published, ALL)
    train(uninterrupted)
    uninterrupted.save(tmp_path / "saved")
    resumed = worker_of(published, ALL, seed=77)
    resumed.restore(tmp_path / "saved")
    for worker in (uninterrupted, resumed):
        train(worker, seed=1)
    ours, theirs = (adapter_tensors(worker.policy.model) for worker in (uninterrupted, resumed))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_engines_get_merged_weights_and_the_towers_as_they_are(published: Path) -> None:
    worker = worker_of(published, ALL)
    train(worker)
    sent = dict(checkpoint_weights(worker.named_weights(), experts_in(published)))
    stored, updates = tensors_of(published), updates_of(worker.policy.model)
    assert sent.keys() == stored.keys()
    assert updates.keys() <= sent.keys()
    for name, tensor in stored.items():
        expected = updates[name].added_to(tensor) if name in updates else tensor
        torch.testing.assert_close(sent[name].detach(), expected.detach(), rtol=0, atol=1e-6)
    assert any(is_of_tower(name) for name in sent) and not any(is_of_tower(name) for name in updates)


def test_a_saved_adapter_starts_another_run_and_another_pattern_is_refused(published: Path, tmp_path: Path) -> None:
    worker = worker_of(published, ATTENTION)
    train(worker)
    worker.save(tmp_path)
    file = tmp_path / ADAPTER / ADAPTER_CONFIG
    fields = json.loads(file.read_text())
    assert (fields["exclude_modules"], sorted(fields["target_modules"])) == (TOWER_MODULES, ["o_proj", "q_proj"])
    read = AdapterConfig.read(tmp_path / ADAPTER)
    assert read.target_modules == ATTENTION.target_modules
    again = TorchRankWorker(settings_of(published, lora=LoraSettings(read, initial_adapter=tmp_path / ADAPTER)), World())
    ours, theirs = (adapter_tensors(each.policy.model) for each in (worker, again))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    file.write_text(json.dumps(fields | {"exclude_modules": r".*\.layers\.0\..*"}))
    with pytest.raises(CheckpointError, match="exclude_modules"):
        AdapterConfig.read(tmp_path / ADAPTER)
