"""SGLang sees the images of prompts as the trainer does: the same token ids, pixels and positions, through the router and from any file."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from fuligo.engines.client import EngineClient
from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import SGLangServer
from fuligo.formats.payload import shared_payload
from fuligo.models.vision.processor import ImageProcessor, ResizedImages
from fuligo.rollout.generate import SingleTurn
from fuligo.types import Sample, SampleStatus
from tests import tiny, tiny_vision
from tests.e2e.command import environment
from tests.e2e.warm_children import ForkServer
from tests.parity.test_vision_trainer import own_inputs
from tests.sglang import oracle
from tests.sglang.engines import ENVIRONMENT, server_settings, sglang_python
from tests.sglang.test_job import metrics

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
MEDIA = {tiny_vision.token_id(text) for text in tiny_vision.VISION_TOKENS}
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)


def jpeg_on_its_side(width: int, height: int) -> bytes:
    """Return a photo that its EXIF data turns by 90 degrees."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[274] = 6
    tiny_vision.decoded(tiny_vision.png(width, height, seed=5)).save(file, "JPEG", exif=exif)
    return file.getvalue()


async def test_log_probabilities_are_those_of_transformers(claims: PortClaims, tmp_path: Path) -> None:
    """Also after a sync that changes the vision tower, of images that the engine has seen before."""
    checkpoint = tiny_vision.save_checkpoint(tmp_path / "model")
    processor = ImageProcessor(checkpoint)
    arguments = {"max_total_tokens": 4096, "disable_fast_image_processor": True}
    settings = server_settings("engine", checkpoint, claims, tmp_path / "engine.txt", arguments=arguments)
    server = SGLangServer(settings)
    client = EngineClient(server.url, server.settings.keys, timeout_s=120.0)
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    tower = [(name, weight) for name, weight in model.named_parameters() if name.startswith("model.visual.")]
    try:
        await server.wait_ready()
        first = await sampled(client, processor)
        require_same(model, first, processor)
        with torch.no_grad():
            for _, weight in tower:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())), alpha=0.1)
        with shared_payload(tower) as payload:
            await client.update_weights_from_tensor([payload], version=2)
        second = await sampled(client, processor)
        require_same(model, second, processor)
        with pytest.raises(AssertionError):
            require_same(model, first, processor)
    finally:
        await client.close()
        await server.stop()


async def sampled(client: EngineClient, processor: ImageProcessor) -> list[Sample]:
    """Return samples of some prompts with images, each twice."""
    images = [tiny_vision.png(33, 41), tiny_vision.png(100, 17, seed=1), jpeg_on_its_side(30, 20)]
    prompts = [(images[0], [20, 21]), ([30], images[1], images[2], [22, 23]), ([24, 25, 26],), (images[2], [27], images[0], [28])]
    generate = SingleTurn(client, tiny.tokenizer(), timeout_s=120.0, images=ResizedImages(processor))
    samples: list[Sample] = []
    for index, parts in enumerate(prompts * 2):
        ids, placed = tiny_vision.prompt_of(processor, *parts)
        sample = await generate(Sample(index, 0, "p", ids, images=placed), PARAMS)
        if not MEDIA & set(sample.response_ids.tolist()):  # SGLang refuses more of their tokens than there are images
            sample = await generate(sample, replace(PARAMS, max_new_tokens=20))
        samples.append(sample)
    assert all(sample.status is SampleStatus.TRUNCATED for sample in samples), [sample.error for sample in samples]
    return samples


def require_same(model: Qwen3VLForConditionalGeneration, samples: list[Sample], processor: ImageProcessor) -> None:
    whole = [sample for sample in samples if not MEDIA & set(sample.response_ids.tolist())]
    assert sum(sample.response_length == 20 for sample in whole) >= 3, "these went on with tokens behind their images"
    for sample in whole:  # transformers takes a sampled image token for one of an image
        found = own_logprobs(model, sample, processor)
        assert np.abs(found - sample.engine_logprobs).max() < oracle.TOLERANCE


@torch.no_grad()
def own_logprobs(model: Qwen3VLForConditionalGeneration, sample: Sample, processor: ImageProcessor) -> np.ndarray:
    """Return [R] log-probabilities of the response by transformers' forward pass."""
    logits = model(**own_inputs(sample, processor), use_cache=False).logits[0, :-1]
    targets = torch.from_numpy(sample.tokens[1:].astype(np.int64))
    return logits.log_softmax(-1).gather(1, targets[:, None])[len(sample.prompt_ids) - 1 :, 0].numpy()


@pytest.mark.slow
def test_a_model_learns_to_count_what_it_sees(warm_commands: ForkServer, tmp_path: Path) -> None:
    """Also through the router, which rebuilds each request by its own schema."""
    run = tmp_path / "run"
    given = ["--rollout-backend", "sglang", "--train-backend", "torch", "--rollout-num-gpus", "1", "--actor-num-gpus-per-node", "1"]
    engines = ["--engine-python", str(sglang_python()), "--engine-env", json.dumps(ENVIRONMENT), "--check-weight-update-equal"]
    words = [sys.executable, "-m", "fuligo", "train", "--config", str(SHAPES / "config.yaml"), "--run-dir", str(run), *given, *engines]
    words += ["--num-rollout", "8", "--no-eval", "--progress", "plain", "--rollout-batch-size", "24"]
    with warm_commands.serving():
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = metrics(run)
    rewards = [step["rollout/reward_mean"] for step in steps]
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert all(step["rollout/num_failed"] == 0 for step in steps)
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-3
