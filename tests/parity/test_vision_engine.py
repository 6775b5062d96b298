"""Embedded engine on prompts with images against transformers' own forward pass of one sequence at a time."""

import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForImageTextToText

from fuligo.engines.answers import encoded_images
from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.generate_body import parse_requests
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.models.vision.positions import rotary_positions
from fuligo.types import PromptImage
from tests import tiny_vision

IMAGES = [tiny_vision.png(16, 24), tiny_vision.png(40, 9, seed=1), tiny_vision.png(16, 24, seed=2)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory) -> Path:
    return tiny_vision.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine = EmbeddedEngine(
        EngineModel(str(checkpoint), torch.device("cpu"), torch.float32),
        max_running_requests=4,
        max_total_tokens=16384,
        on_ended=lambda requests: [request.waiter.set_result(request) for request in requests] and None,
        on_failure=lambda: None,
    )
    engine.thread.start()
    yield engine
    engine.thread.stop()


def submit(engine: EmbeddedEngine, ids: list[int], images: tuple[PromptImage, ...], *, seed: int = 0, **body) -> Request:
    """Send a request as the client does."""
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed}
    raw = orjson.dumps({"input_ids": ids, "sampling_params": params, "image_data": encoded_images(images), **body})
    (request,), _ = parse_requests(raw, engine.model, Future)
    engine.submit(request)
    return request


def prompt(engine: EmbeddedEngine, *parts) -> tuple[list[int], tuple[PromptImage, ...]]:
    assert engine.model.vision is not None
    ids, images = tiny_vision.prompt_of(engine.model.vision.processor, *parts)
    return ids.tolist(), images


@torch.no_grad()
def own_logprobs(checkpoint: Path, engine: EmbeddedEngine, request: Request) -> np.ndarray:
    """Return the log-probabilities of the sampled tokens; an image token among them is text, so its mask ends with the prompt."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="eager").eval()
    assert engine.model.vision is not None
    processor = engine.model.vision.processor
    patches = [processor.patches(image.data, image.digest) for image in request.images]
    prompt_ids = torch.tensor([request.input_ids])
    whole = torch.tensor([request.input_ids + request.output_ids])
    embeds = model.get_input_embeddings()(whole)
    kwargs = {}
    if patches:
        values = torch.cat([torch.from_numpy(each.values) for each in patches])
        grids = torch.tensor([[1, each.num_rows, each.num_columns] for each in patches])
        features = model.model.get_image_features(values, grids, return_dict=True)
        mask = torch.zeros_like(whole, dtype=torch.bool)
        mask[:, : prompt_ids.shape[1]] = prompt_ids == tiny_vision.token_id("<|image_pad|>")
        embeds = embeds.masked_scatter(mask[..., None], torch.cat(features.pooler_output))
        if (deepstack := getattr(features, "deepstack_features", None)) is not None:
            kwargs = {"visual_pos_masks": mask, "deepstack_visual_embeds": deepstack}
    positions = torch.from_numpy(rotary_positions(whole.shape[1], request.images))[:, None]
    hidden = model.model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **kwargs).last_hidden_state
    logprobs = model.lm_head(hidden)[0].log_softmax(-1)
    start = len(request.input_ids)
    return logprobs[start - 1 : -1].gather(1, whole[0, start:, None])[:, 0].numpy()


def test_logprobs_equal_the_models_own_forward(checkpoint, engine):
    """Prefill, copied prompts and decoding, of requests with equal ids and different images, which must not share a prompt."""
    same_ids = [prompt(engine, [20], image, [21, 22]) for image in (IMAGES[0], IMAGES[2])]
    assert same_ids[0][0] == same_ids[1][0]
    given = [*same_ids, same_ids[0], prompt(engine, IMAGES[1], [23], IMAGES[0], [24]), prompt(engine, [25, 26]), same_ids[1]]
    requests = [submit(engine, ids, images, seed=number) for number, (ids, images) in enumerate(given)]
    for request in requests:
        request.waiter.result(timeout=60)
        np.testing.assert_allclose(request.logprobs, own_logprobs(checkpoint, engine, request), atol=TOLERANCE)
    is_copied = not engine.model.cache_shape.recurrent.layers
    assert requests[2].cached_tokens == (len(requests[2].input_ids) - 1 if is_copied else 0)
    assert requests[1].cached_tokens == 0, "another image"


def test_a_response_continues_after_its_images(checkpoint, engine):
    """The request holds the tokens so far, an image token among them; the images keep their places, and positions continue."""
    ids, images = prompt(engine, IMAGES[0], [20])
    continued = [*ids, 33, tiny_vision.token_id("<|image_pad|>"), 34]
    request = submit(engine, continued, images)
    request.waiter.result(timeout=60)
    want = own_logprobs_of_continuation(checkpoint, engine, request, len(ids))
    np.testing.assert_allclose(request.logprobs, want, atol=TOLERANCE)


def own_logprobs_of_continuation(checkpoint: Path, engine: EmbeddedEngine, request: Request, prompt_length: int) -> np.ndarray:
    whole = Request(
        request.rid,
        request.input_ids[:prompt_length],
        request.params,
        request.end_ids,
        request.seed,
        images=request.images,
        output_ids=request.input_ids[prompt_length:] + request.output_ids,
    )
    return own_logprobs(checkpoint, engine, whole)[-len(request.output_ids) :]


def test_a_response_that_is_taken_back_computes_its_images_again(checkpoint, engine):
    """A request whose keys are dropped is prefilled again with its tokens so far."""
    ids, images = prompt(engine, [20], IMAGES[1], [21])
    request = submit(engine, ids, images, sampling_params={"max_new_tokens": 300, "ignore_eos": True})
    while len(request.output_ids) < 3:
        time.sleep(0.001)
    engine.pause("retract").result(timeout=60)
    so_far = len(request.output_ids)
    engine.resume().result(timeout=60)
    request.waiter.result(timeout=60)
    assert 3 <= so_far < 300
    np.testing.assert_allclose(request.logprobs, own_logprobs(checkpoint, engine, request), atol=TOLERANCE)


def test_given_tokens_are_scored_with_their_images(checkpoint, engine):
    ids, images = prompt(engine, IMAGES[1], [20, 21, 22, 23])
    start = len(ids) - 4
    request = submit(engine, ids, images, sampling_params={"max_new_tokens": 0}, logprob_start_len=start)
    request.waiter.result(timeout=60)
    whole = Request("", ids[: start + 1], request.params, frozenset(), 0, images=images, output_ids=ids[start + 1 :])
    np.testing.assert_allclose(request.input_logprobs, own_logprobs(checkpoint, engine, whole), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("image_data", "reason"),
    [
        (["/etc/passwd"], "paths and URLs are not read"),
        (["http://127.0.0.1/secret.png"], "paths and URLs are not read"),
        (["\u00e9"], "is not base64"),
        (["aGVsbG8="], "not an image in one of the formats"),
        ([5], "a list of them"),
        (["aGVsbG8="] * 65, "65 images, but a request may have at most 64"),
        (encoded_images([PromptImage("", tiny_vision.png(64, 64), "", 0, 1, 1)]), "8 x 8 tokens, but the prompt has 6 image tokens"),
        (encoded_images([PromptImage("", IMAGES[0][:-30], "", 0, 1, 1)]), "the image is damaged"),
        (encoded_images([PromptImage("", IMAGES[0], "", 0, 1, 1)] * 2), "image 1 has no tokens in the prompt"),
    ],
)
def test_images_that_do_not_fit_are_refused(engine, image_data, reason):
    ids, _ = prompt(engine, IMAGES[0], [20])
    with pytest.raises(ValueError, match=reason):
        parse_requests(orjson.dumps({"input_ids": ids, "image_data": image_data}), engine.model, Future)
