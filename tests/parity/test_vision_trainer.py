"""Torch trainer on samples with images against transformers' own forward pass of one sample at a time, and plain autograd."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForImageTextToText

from fuligo.errors import DataError
from fuligo.formats.adapter_config import ADAPTER, AdapterConfig
from fuligo.models.adapter import adapter_tensors
from fuligo.models.vision.positions import rotary_positions, rotary_shift
from fuligo.models.vision.processor import ImageProcessor
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, LoraSettings, OptimizerSettings, TrainedParameters
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainSample
from tests import shares, tiny_vision, train_batches
from tests.float64 import assert_gradients_agree, float32_bound, in_float64, use_delta_rule

IMAGES = [tiny_vision.png(16, 24), tiny_vision.png(40, 9, seed=1), tiny_vision.png(30, 30, seed=2)]
PROMPTS = [
    (IMAGES[0], [20, 21]),
    ([30, 31], IMAGES[0], [22]),
    ([23, 24, 25],),
    ([26], IMAGES[1], IMAGES[2], [27, 28]),
    (IMAGES[2], [29], IMAGES[0], [31, 32, 33]),
    (IMAGES[0], [20, 21]),
]
"""One and two images, an image that samples share, only text, and neighboring images without text between them."""


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory) -> Path:
    return tiny_vision.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def samples(checkpoint) -> list[TrainSample]:
    processor = ImageProcessor(checkpoint)
    made: list[TrainSample] = []
    for index, parts in enumerate(PROMPTS):
        ids, images = tiny_vision.prompt_of(processor, *parts)
        plain = train_batches.sample(index, prompt_length=len(ids), response_length=4 + index)
        tokens = np.concatenate([ids, plain.tokens[len(ids) :] % 300 + 10]).astype(np.int32)
        made.append(replace(plain, tokens=tokens, images=images))
    return made


def settings_of(checkpoint: Path, **changes) -> TorchTrainerSettings:
    settings = TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
        loss=LossSettings(loss_type="sft_loss"),
        needs_old_logprobs=True,
        capacity=Capacity(max_tokens=60),
        score_capacity=Capacity(max_tokens=60),
        chunk_tokens=7,
    )
    return replace(settings, **changes)


def own_inputs(sample: TrainSample, processor: ImageProcessor) -> dict[str, torch.Tensor]:
    """Return the inputs of transformers' model for one sample."""
    ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    if not sample.images:
        return {"input_ids": ids}
    patches = [processor.patches(image.data, image.digest) for image in sample.images]
    return {
        "input_ids": ids,
        "pixel_values": torch.cat([torch.from_numpy(each.values) for each in patches]),
        "image_grid_thw": torch.tensor([[1, each.num_rows, each.num_columns] for each in patches]),
        "mm_token_type_ids": (ids == tiny_vision.token_id("<|image_pad|>")).int(),
    }


def own_logprobs(model: AutoModelForImageTextToText, sample: TrainSample, processor: ImageProcessor) -> torch.Tensor:
    """Return [R] log-probabilities of the response by transformers' forward pass."""
    logits = model(**own_inputs(sample, processor), use_cache=False).logits[0, :-1]
    targets = torch.from_numpy(sample.tokens[1:].astype(np.int64))
    return logits.log_softmax(-1).gather(1, targets[:, None])[sample.prompt_length - 1 :, 0]


def test_positions_are_those_of_transformers(checkpoint, samples):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = ImageProcessor(checkpoint)
    for sample in samples:
        length = len(sample.tokens)
        if not sample.images:
            np.testing.assert_array_equal(rotary_positions(length, ()), np.tile(np.arange(length), (3, 1)))
            continue
        inputs = own_inputs(sample, processor)
        del inputs["pixel_values"]
        want, shift = model.model.get_rope_index(**inputs)
        np.testing.assert_array_equal(rotary_positions(length, sample.images), want[:, 0].numpy())
        assert rotary_shift(sample.images) == shift.item()


def test_logprobs_equal_the_models_own_forward(checkpoint, samples):
    worker = TorchRankWorker(settings_of(checkpoint), World())
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="eager").eval()
    processor = ImageProcessor(checkpoint)
    scored = shares.scored(worker, samples)
    assert scored is not None
    for sample in scored:
        with torch.no_grad():
            want = own_logprobs(model, sample, processor)
        assert sample.old_logprobs is not None
        np.testing.assert_allclose(sample.old_logprobs, want.numpy(), atol=1e-4)
    first, last = (
        scored[0],
        replace(scored[0], images=(replace(scored[0].images[0], data=tiny_vision.png(16, 24, seed=9), digest="another"),)),
    )
    (changed,) = shares.scored(worker, [last]) or []
    assert np.abs(changed.old_logprobs - first.old_logprobs).max() > 1e-2, "the image matters"


def summed_loss(model: nn.Module, samples: list[TrainSample], processor: ImageProcessor) -> torch.Tensor:
    """Return the loss of a step on the samples by transformers' forward pass."""
    loss = torch.zeros(())
    for sample in samples:
        mask = torch.from_numpy(sample.loss_mask.astype(np.float32))
        loss = loss - (own_logprobs(model, sample, processor) * mask).sum() / mask.sum() / len(samples)
    return loss


@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_equal_autograd(checkpoint, samples, is_frozen):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="eager")
    use_delta_rule(model)
    with in_float64(model):
        summed_loss(model, samples, ImageProcessor(checkpoint)).backward()
    want = {name: p.grad for name, p in model.named_parameters() if not (is_frozen and name.startswith("model.visual."))}

    frozen = TrainedParameters(frozen=(r"^model\.visual\.",)) if is_frozen else TrainedParameters()
    for is_float64 in (True, False):
        worker = TorchRankWorker(settings_of(checkpoint, trained=frozen, gradient_checkpointing=not is_frozen), World())
        with in_float64(worker.policy.model) if is_float64 else nullcontext():
            worker.gradients(shares.to_train(worker, train_batches.batch(samples))[0])
        found = {name: p.grad for name, p in worker.policy.model.named_parameters() if p.grad is not None}
        assert_gradients_agree(found, want, bound=1e-6 if is_float64 else float32_bound(want))  # loss weights are float32


def test_an_image_token_in_a_response_is_text(checkpoint, samples):
    """transformers' model would look for one more image; its language model by itself treats the id as text."""
    worker = TorchRankWorker(settings_of(checkpoint), World())
    first = samples[0]
    tokens = first.tokens.copy()
    tokens[-2] = tiny_vision.token_id("<|image_pad|>")
    scored = shares.scored(worker, [first, replace(first, tokens=tokens)])
    assert scored is not None and scored[0].old_logprobs is not None and scored[1].old_logprobs is not None
    np.testing.assert_allclose(scored[0].old_logprobs[:-2], scored[1].old_logprobs[:-2], atol=1e-5)
    assert np.isfinite(scored[1].old_logprobs).all()


def test_an_adapter_is_that_of_peft_on_the_language_model(checkpoint, samples, tmp_path):
    lora = LoraSettings(AdapterConfig(rank=4, alpha=8.0))
    worker = TorchRankWorker(settings_of(checkpoint, lora=lora, reference_weights=checkpoint), World())
    worker.train(shares.to_train(worker, train_batches.batch(samples)))
    worker.save(tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / ADAPTER, is_trainable=True)
    processor = ImageProcessor(checkpoint)
    for logprobs, sample in zip(worker.logprobs(shares.to_score(worker, samples)) or [], samples, strict=True):
        np.testing.assert_allclose(logprobs, own_logprobs(theirs, sample, processor).detach().numpy(), atol=1e-4)
    with in_float64(worker.policy.model, theirs):
        worker.gradients(shares.to_train(worker, train_batches.batch(samples))[0])
        summed_loss(theirs, samples, processor).backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in adapter_tensors(worker.policy.model).items()}
    assert not any(".visual." in name for name in ours)
    assert_gradients_agree(ours, expected, bound=1e-6)


def test_values_are_those_of_the_models_own_hidden_states(checkpoint, samples, tmp_path):
    """The value model has a tower of its own, and is saved and restored with it."""
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="eager").eval()
    head = torch.nn.Linear(model.config.text_config.hidden_size, 1, bias=False)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "values")
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-3))
    settings = settings_of(checkpoint, critic=CriticSettings(tmp_path / "values", optimizer))
    worker = TorchRankWorker(settings, World())
    scored = shares.scored(worker, samples) or []
    processor = ImageProcessor(checkpoint)
    for sample in scored:
        with torch.no_grad():
            hidden = model.model(**own_inputs(sample, processor), use_cache=False).last_hidden_state[0, sample.prompt_length - 1 : -1]
        np.testing.assert_allclose(sample.values, head(hidden)[:, 0].detach().numpy(), atol=1e-4)
    worker.train(shares.to_train(worker, train_batches.batch(train_batches.with_returns(scored, noise=0.2))))
    worker.save(tmp_path / "saved")
    resumed = TorchRankWorker(settings, World())
    resumed.restore(tmp_path / "saved")
    assert worker.critic is not None and resumed.critic is not None
    ours, theirs = (dict(each.critic.value_model.model.named_parameters()) for each in (worker, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_image_that_does_not_fit_its_sample_is_named(checkpoint, samples):
    """The tower's features would go to other tokens."""
    worker = TorchRankWorker(settings_of(checkpoint), World())
    image = samples[0].images[0]
    other = replace(image, data=IMAGES[1], digest="other")
    with pytest.raises(DataError, match=f"a test has {image.num_rows} x {image.num_columns} tokens in its sample, but .* makes 1 x 5"):
        shares.scored(worker, [replace(samples[0], images=(other,))])
    damaged = replace(image, data=image.data[:-30], digest="damaged")
    with pytest.raises(DataError, match="a test: the image is damaged"):
        shares.scored(worker, [replace(samples[0], images=(damaged,))])


# towers are sharded alike, and test_whole_checkpoint.py has two ranks of qwen3_5_moe
@pytest.mark.parametrize("checkpoint", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)], indirect=True, scope="module")
@pytest.mark.usefixtures("warm_children")
async def test_two_ranks_train_as_one_though_one_has_no_image(checkpoint, samples, tmp_path):
    """Sharded towers gather their weights on every rank."""
    settings = settings_of(checkpoint, capacity=Capacity(max_samples=1), score_capacity=Capacity(max_samples=1), command_timeout_s=120.0)
    chosen = [samples[2], replace(samples[0], index=7)]
    scores = []
    for num_ranks in (1, 2):
        trainer = LocalTrainer(replace(settings, num_ranks=num_ranks))
        await trainer.load()
        try:
            result = await trainer.train(train_batches.batch(chosen))
            scored = await trainer.score(chosen)
            scores.append((result.metrics["train/grad_norm"], [sample.old_logprobs for sample in scored]))
            await trainer.save(tmp_path / str(num_ranks))
        finally:
            await trainer.close()
    (norm, logprobs), (norm_of_two, logprobs_of_two) = scores
    assert norm_of_two == pytest.approx(norm, rel=1e-5)
    for one, two in zip(logprobs, logprobs_of_two):
        np.testing.assert_allclose(one, two, atol=1e-4)
