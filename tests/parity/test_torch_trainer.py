"""Torch trainer against transformers' padded forward pass and plain autograd, for several model families."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fuligo.formats.adapter_config import TOWER_MODULES
from fuligo.models.transformers_types import model_class, read_config
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, tiny_vision, train_batches
from tests.float64 import assert_gradients_agree, delta_rule, float32_bound, in_float64, use_delta_rule

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2)]


OVERRIDES = {"glm4_moe_lite": {"rms_norm_eps": 1e-6}, "gemma3_text": {"sliding_window": 8}, "gemma4_text": tiny.GEMMA4}
"""The epsilon that transformers uses for latent norms, whatever config.json states; a window that is shorter than samples."""


FAMILIES = (
    "qwen3",
    "llama",
    "mistral",
    "glm4",
    "qwen2",
    "qwen3_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "minimax_m2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gpt_oss",
    "gemma3_text",
    "gemma4_text",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma4",
)
FEW = ("qwen3", "qwen3_5_moe")
"""A plain family, and one with a tower, experts and recurrent layers."""
few_families = pytest.mark.parametrize(
    "checkpoint",
    [*FEW, *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in FEW)],
    indirect=True,
    scope="module",
)
"""Other families repeat which weights score and at which temperature; their own passes are in the tests of every family."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model") / request.param, request.param)


def save(directory: Path, family: str, *, seed: int = 0) -> Path:
    """Save a checkpoint; one of a model with a vision tower has no image processor, which prompts of text do without."""
    if family == "gemma4":
        return tiny_vision.save_gemma4(directory, seed=seed)
    if family in tiny_vision.LANGUAGE:
        return tiny_vision.save_checkpoint(directory, family, seed=seed, has_processor=False, tied=False)
    return tiny.save_checkpoint(directory, family, seed=seed, **OVERRIDES.get(family, {}))


def settings_of(checkpoint: Path, **changes) -> TorchTrainerSettings:
    settings = TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
        loss=LossSettings(entropy_coef=0.01),
        needs_old_logprobs=True,
        takes_images=False,
    )
    return replace(settings, **changes)


def own_model(checkpoint: Path) -> PreTrainedModel:
    return model_class(read_config(checkpoint)).from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")


def padded_scores(checkpoint: Path, samples, temperature: float = 1.0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (log-probabilities, entropies) of response tokens from one right-padded batch, run by transformers."""
    model = own_model(checkpoint).eval()
    longest = max(len(s.tokens) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, s in enumerate(samples):
        ids[row, : len(s.tokens)] = torch.from_numpy(s.tokens.astype(np.int64))
        mask[row, : len(s.tokens)] = 1
    with torch.no_grad():
        log_softmax = (model(ids, attention_mask=mask).logits / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    logprobs = log_softmax[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return [
        (logprobs[row, s.prompt_length - 1 : len(s.tokens) - 1].numpy(), entropy[row, s.prompt_length - 1 : len(s.tokens) - 1].numpy())
        for row, s in enumerate(samples)
    ]


def test_logprobs_and_entropy_equal_the_padded_forward(checkpoint):
    """Includes the first response token, the borders of packed samples, a temperature, and the full vocabulary."""
    assert_logprobs_and_entropy_equal_the_padded_forward(checkpoint, temperature=0.6)


@few_families
def test_logprobs_and_entropy_equal_the_padded_forward_at_temperature_1(checkpoint):
    assert_logprobs_and_entropy_equal_the_padded_forward(checkpoint, temperature=1.0)


def assert_logprobs_and_entropy_equal_the_padded_forward(checkpoint: Path, temperature: float) -> None:
    samples = train_batches.samples(LENGTHS)
    worker = TorchRankWorker(settings_of(checkpoint, temperature=temperature, capacity=Capacity(max_tokens=40), chunk_tokens=7), World())
    want = padded_scores(checkpoint, samples, temperature)

    scored = shares.scored(worker, samples)
    result = worker.train(shares.to_train(worker, train_batches.batch(scored)))

    for position, (s, (logprobs, entropy)) in enumerate(zip(scored, want)):
        np.testing.assert_allclose(s.old_logprobs, logprobs, atol=2e-5)
        np.testing.assert_allclose(result.scores[position].logprobs, logprobs, atol=2e-5)
        np.testing.assert_allclose(result.scores[position].entropy, entropy, atol=2e-5)


def trainer_gradients(checkpoint: Path, *, is_float64: bool = False) -> dict[str, Tensor]:
    settings = settings_of(checkpoint, loss=LossSettings(loss_type="sft_loss"), chunk_tokens=5, capacity=Capacity(max_tokens=30))
    worker = TorchRankWorker(settings, World())
    model = worker.policy.model
    assert all(not parameter.requires_grad for name, parameter in model.named_parameters() if re.match(TOWER_MODULES, name))
    with in_float64(model) if is_float64 else nullcontext():
        worker.gradients(shares.to_train(worker, train_batches.batch(train_batches.samples(LENGTHS)))[0])
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def exact_gradients(checkpoint: Path, rule: Callable[..., tuple[Tensor, None]] = delta_rule) -> dict[str, Tensor]:
    """Return the gradients of transformers' model in float64, one sample at a time, with `rule` in its Gated DeltaNet layers."""
    model, samples = own_model(checkpoint), train_batches.samples(LENGTHS)
    use_delta_rule(model, rule)
    with in_float64(model):
        for s in samples:
            ids = torch.from_numpy(s.tokens.astype(np.int64))
            log_softmax = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            logprobs = log_softmax.gather(1, ids[1:, None])[s.prompt_length - 1 :, 0]
            mask = torch.from_numpy(s.loss_mask.astype(np.float64))
            (-(logprobs * mask).sum() / mask.sum() / len(samples)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradient_equals_autograd_through_the_models_own_forward(checkpoint):
    """Covers packing, response-only logits, chunks, and samples of unequal length."""
    expected = exact_gradients(checkpoint)
    assert_gradients_agree(trainer_gradients(checkpoint, is_float64=True), expected, bound=1e-6)  # loss weights are float32
    assert_gradients_agree(trainer_gradients(checkpoint), expected, bound=float32_bound(expected))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_slightly_other_delta_rule_has_other_gradients(family, tmp_path):
    """The bound of the test above is tight enough to find decays that are wrong by a hundred-thousandth."""

    def slower(*inputs: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, None]:
        return delta_rule(*inputs, g=g * 0.99999, **options)

    checkpoint = save(tmp_path, family)
    found = trainer_gradients(checkpoint, is_float64=True)
    assert_gradients_agree(found, exact_gradients(checkpoint), bound=1e-6)
    with pytest.raises(AssertionError, match="linear_attn"):
        assert_gradients_agree(found, exact_gradients(checkpoint, slower), bound=1e-6)


@few_families
def test_teacher_logprobs_are_the_teacher_models(checkpoint, tmp_path):
    """The teacher may have another shape, and there is a reference as well; it scores at the student's temperature."""
    teacher = tiny.save_checkpoint(tmp_path, seed=6, layers=3, hidden=32)
    samples = train_batches.samples(LENGTHS)
    worker = TorchRankWorker(settings_of(checkpoint, teacher_weights=teacher, reference_weights=checkpoint, temperature=0.6), World())
    for s, (logprobs, _) in zip(shares.scored(worker, samples), padded_scores(teacher, samples, 0.6)):
        np.testing.assert_allclose(s.teacher_logprobs, logprobs, atol=2e-5)


@few_families
def test_reference_logprobs_are_the_reference_models(checkpoint, tmp_path):
    family = checkpoint.name
    reference = save(tmp_path, family, seed=5)
    samples = train_batches.samples(LENGTHS)
    worker = TorchRankWorker(settings_of(checkpoint, reference_weights=reference, loss=LossSettings(kl_loss=KlLoss(0.1, "k3"))), World())
    for s, (logprobs, _) in zip(shares.scored(worker, samples), padded_scores(reference, samples)):
        np.testing.assert_allclose(s.ref_logprobs, logprobs, atol=2e-5)
