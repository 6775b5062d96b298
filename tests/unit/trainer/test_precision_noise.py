"""Precision noise: equal to that of transformers in bfloat16 and float32, on any number of ranks; measuring it does not change the run."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.trainer.precision_noise import Unmeasured, noise_samples
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend import precision_noise
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.types import TrainSample
from tests import train_batches

SAMPLES = train_batches.samples([(4, 9), (1, 3), (6, 9), (2, 4), (5, 14), (3, 9)])
BATCH = train_batches.batch(SAMPLES)
METRIC = "train/precision_noise"


@pytest.fixture
def settings(checkpoint: Path) -> TorchTrainerSettings:
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-2))
    return TorchTrainerSettings(hf_checkpoint=checkpoint, initial_weights=checkpoint, optimizer=optimizer, precision="bf16")


async def loaded(settings: TorchTrainerSettings) -> LocalTrainer:
    trainer = LocalTrainer(settings)
    await trainer.load()
    return trainer


def noise_in_transformers(checkpoint: Path) -> float:
    half = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    full = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).float()
    differences = [(logprobs_of(half, sample) - logprobs_of(full, sample)).abs() for sample in SAMPLES]
    return fmean(difference[sample.loss_mask != 0].mean().item() for difference, sample in zip(differences, SAMPLES, strict=True))


@torch.no_grad()
def logprobs_of(model: Any, sample: TrainSample) -> torch.Tensor:
    """Return the [R] log-probabilities, computed from logits that are not rounded."""
    ids = torch.from_numpy(sample.tokens).long()
    hidden = model.model(input_ids=ids[None]).last_hidden_state[0, sample.prompt_length - 1 : -1]
    return (hidden.float() @ model.lm_head.weight.float().T).log_softmax(-1).gather(1, ids[sample.prompt_length :, None])[:, 0]


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_the_metric_is_the_noise_in_transformers(settings, checkpoint: Path, num_ranks: int) -> None:
    trainer = await loaded(replace(settings, num_ranks=num_ranks))
    first, second = (await trainer.train(BATCH)).metrics, (await trainer.train(BATCH)).metrics
    await trainer.close()
    assert first[METRIC] == pytest.approx(noise_in_transformers(checkpoint), rel=1e-3)
    assert METRIC not in second, "once is enough"


async def test_a_resumed_run_equals_one_that_was_not_interrupted(settings, tmp_path: Path) -> None:
    settings = replace(settings, lora=LoraSettings(AdapterConfig(rank=4, alpha=8.0, dropout=0.5)))  # dropout draws random numbers
    trainer = await loaded(settings)
    assert METRIC in (await trainer.train(BATCH)).metrics
    await trainer.save(tmp_path)
    metrics = (await trainer.train(BATCH)).metrics
    whole = {name: tensor.clone() for name, tensor in trainer.worker.named_weights()}
    await trainer.close()
    resumed = await loaded(settings)
    await resumed.restore(tmp_path)
    found = (await resumed.train(BATCH)).metrics
    assert found | {"train/tokens_per_s": metrics["train/tokens_per_s"]} == metrics
    for name, tensor in resumed.worker.named_weights():
        assert torch.equal(tensor, whole[name]), name
    await resumed.close()


@dataclass(slots=True, frozen=True)
class WorldWithAFailure(World):
    """World in which another rank fails in call `at` of `sum`, before a unit is gathered."""

    calls: Any = None
    at: int = 2

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(tensor)
        return tensor + (len(self.calls) == self.at)

    def gather(self, value: Any) -> list[Any]:
        return [value, Unmeasured("OutOfMemoryError: 1 GiB")]


async def test_a_failed_measurement_does_not_change_the_run(settings, caplog, monkeypatch) -> None:
    trainer = await loaded(settings)
    worker: Any = trainer.worker
    hooks = [dict(module._forward_pre_hooks) for module in worker.policy.modules()]
    parameters, random = dict(worker.policy.named_parameters()), torch.get_rng_state()
    noise = worker.precision_noise(SAMPLES)
    elsewhere = WorldWithAFailure(calls=[])
    assert precision_noise.precision_noise(worker.policy, SAMPLES, elsewhere, per_token=False) == Unmeasured("OutOfMemoryError: 1 GiB")
    assert len(elsewhere.calls) == 2, "this rank ends as soon as it learns of the failure"

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(precision_noise, "_full", no_memory)
        metrics = (await trainer.train(BATCH)).metrics
    assert METRIC not in metrics and metrics["train/grad_norm"] > 0
    told = "cannot measure the model's precision noise: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB; the health page"
    assert told in caplog.text and "more" not in caplog.text
    assert [dict(module._forward_pre_hooks) for module in worker.policy.modules()] == hooks
    assert all(parameter is parameters[name] for name, parameter in worker.policy.named_parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert isinstance(noise, float) and noise > 0
    await trainer.close()


@pytest.mark.parametrize("changes", [{"precision": "fp32"}, {"exact_on_policy": True}])
def test_nothing_is_measured_where_engine_and_trainer_cannot_differ_by_it(settings, changes: dict[str, Any]) -> None:
    assert settings.measures_precision_noise
    assert not replace(settings, **changes).measures_precision_noise


def test_samples_are_taken_from_all_prompts_and_cut_to_fit() -> None:
    a, b, c, d = train_batches.samples([(4, 9), (4, 9), (30, 9), (4, 9)])  # two samples of each of two prompts
    masked = replace(b, loss_mask=np.zeros_like(b.loss_mask))
    assert [sample.index for sample in noise_samples([a, b, c, d], 100)] == [0, 2, 1, 3]
    assert [sample.index for sample in noise_samples([a, masked, c, d], 100)] == [0, 2, 3]
    whole, cut = noise_samples([a, b, c, d], 20)
    assert (whole.index, len(whole.tokens)) == (0, 13) and np.array_equal(whole.tokens, a.tokens)
    assert (cut.index, len(cut.tokens), cut.response_length, len(cut.loss_mask)) == (1, 9, 5, 5), "the prompt of c is too long"
    assert noise_samples([masked], 100) == noise_samples([c], 29) == []
