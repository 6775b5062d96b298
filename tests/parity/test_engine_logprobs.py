"""Log-probabilities of the embedded engine against a plain forward pass (1e-4, float32)."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.generation import SamplingParams
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.models.registry import stored_experts
from fuligo.models.transformers_types import model_class, read_config
from tests import tiny, tiny_vision

TOLERANCE = 1e-4
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "llama": {},
    "mistral": {},
    "glm4": {},
    "gpt2": {},
    "qwen3_moe": {},
    "glm4_moe": {},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6, "v_head_dim": 28},  # that epsilon is transformers' for norms of latents, whatever is stated
    "deepseek_v3": {"v_head_dim": 12},  # keys have 20
    "kimi_k2": {},
    "minimax_m2": {},
    "qwen3_next": {"layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "gpt_oss": {"sliding_window": 24},
    "gemma3_text": {},
    "gemma4_text": tiny.GEMMA4,
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "gemma4": {},
}
CACHES = ("qwen3", "glm4_moe_lite", "qwen3_next", "gpt_oss", "gemma3_text", "gemma4")
"""Families with different caches: keys and values, latents, recurrent states, windows with and without sinks, layers that share keys."""
each_cache = pytest.mark.parametrize(
    "checkpoint",
    [family if family in CACHES else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
    indirect=True,
    scope="module",
)
"""Mark of tests that depend on the cache alone (interruptions, prompts around a window's length): other families of a cache are slow."""
STORED_ALIKE = {
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "glm4_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5": "qwen3_5_moe",
    "gemma4_text": "gemma4",
}
"""Families of which an update takes a second or more, and the family that has all kinds of their weights."""
each_storage = pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(family, marks=pytest.mark.slow) if family in STORED_ALIKE else family for family in FAMILIES],
    indirect=True,
    scope="module",
)
"""Updates touch the names and shapes of weights alone."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "gemma4":
        return tiny_vision.save_gemma4(tmp_path_factory.mktemp(request.param))
    if request.param in tiny_vision.LANGUAGE:  # prompts of text need no image processor
        return tiny_vision.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param, has_processor=False)
    return tiny.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])


class Answered:
    """Engine whose finished requests can be awaited."""

    def __init__(self, checkpoint: Path, max_running_requests: int) -> None:
        self.engine = EmbeddedEngine(
            EngineModel(str(checkpoint), torch.device("cpu"), torch.float32),
            max_running_requests=max_running_requests,
            max_total_tokens=16384,
            on_ended=lambda requests: [request.waiter.set_result(request) for request in requests] and None,
            on_failure=lambda: None,
        )
        self.engine.thread.start()

    def submit(self, input_ids: Sequence[int], max_new_tokens: int, **params: Any) -> Request:
        sampling = SamplingParams(max_new_tokens, **params)
        request = Request("r", list(input_ids), sampling, frozenset(), seed=len(input_ids) + max_new_tokens, waiter=Future())
        self.engine.submit(request)
        return request

    def wait(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.waiter.result(timeout=120)
            assert request.error is None


@pytest.fixture
def answered(checkpoint: Path) -> Any:
    answered = Answered(checkpoint, max_running_requests=6)
    yield answered
    answered.engine.thread.stop()


def load_reference(directory: Path) -> PreTrainedModel:
    """Load transformers' own model, which computes one sequence at a time."""
    return model_class(read_config(directory)).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return load_reference(checkpoint)


@torch.no_grad()
def perturb(model: PreTrainedModel, seed: int = 3) -> None:
    torch.manual_seed(seed)
    for tensor in model.state_dict().values():  # with the corrections of routers' scores, which are buffers
        tensor.add_(0.02 * torch.randn_like(tensor))


def as_sent(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return the weights under their checkpoint names."""
    return list(checkpoint_weights(model.state_dict().items(), stored_experts(model.config.to_dict())))


def wait_begun(requests: Sequence[Request], num_tokens: int = 5) -> None:
    deadline = time.monotonic() + 120
    while any(len(request.output_ids) < num_tokens for request in requests):
        assert time.monotonic() < deadline, "the engine does not decode"
        time.sleep(0.001)


@torch.inference_mode()
def worst_difference(model: Any, requests: Sequence[Request]) -> float:
    worst = 0.0
    for request in requests:
        assert len(request.output_ids) == len(request.logprobs) > 0
        logits = model(torch.tensor([request.input_ids + request.output_ids]), use_cache=False).logits[0].float()
        temperature = request.params.temperature
        logprobs = (logits / temperature).log_softmax(-1)[len(request.input_ids) - 1 : -1]
        chosen = logprobs.gather(-1, torch.tensor(request.output_ids)[:, None])[:, 0]
        worst = max(worst, (chosen - torch.tensor(request.logprobs)).abs().max().item())
    return worst


def mixed_requests(answered: Answered, number: int = 14, lengths: Sequence[int] = (1, 2, 12, 40, 90)) -> list[Request]:
    """Send more requests than rows, of mixed lengths and parameters, some with a shared prompt; the KV pool has to grow."""
    rng = random.Random(0)
    common = [rng.randrange(3, 400) for _ in range(20)]
    requests = []
    for index in range(number):
        prompt = common if index % 3 == 0 else [rng.randrange(3, 400) for _ in range(rng.choice([1, 2, 31, 32, 33, 60]))]
        params: dict[str, Any] = rng.choice(
            [{}, {}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 50}, {"temperature": 1.5, "min_p": 0.05}]
        )
        requests.append(answered.submit(prompt, rng.choice(lengths), **params))
    return requests


def test_mixed_lengths_and_refill(answered: Answered, reference: PreTrainedModel) -> None:
    requests = mixed_requests(answered)
    answered.wait(requests)
    assert worst_difference(reference, requests) < TOLERANCE


@each_cache
def test_greedy_decoding_is_transformers(answered: Answered, reference: PreTrainedModel) -> None:
    """Prompts are shorter and longer than windows; transformers decodes with its own cache."""
    model: Any = reference
    model.generation_config.eos_token_id = None
    requests = [answered.submit(range(10, 10 + length), 12, top_k=1, ignore_eos=True) for length in (1, 9, 30)]
    answered.wait(requests)
    for request in requests:
        ids = torch.tensor([request.input_ids])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert request.output_ids == whole[0, ids.size(1) :].tolist()


@each_cache
def test_abort_and_continue(answered: Answered, reference: PreTrainedModel) -> None:
    requests = [answered.submit([5, 6, number], 700) for number in range(3, 7)]
    wait_begun(requests)
    answered.engine.pause("abort").result(60)
    answered.wait(requests)
    answered.engine.resume().result(60)
    assert {request.finish_reason["type"] for request in requests if request.finish_reason} == {"abort"}
    assert worst_difference(reference, requests) < TOLERANCE
    continued = [answered.submit(request.input_ids + request.output_ids, 40) for request in requests]
    answered.wait(continued)
    assert worst_difference(reference, continued) < TOLERANCE


@each_storage
def test_after_updates_of_the_weights(answered: Answered, checkpoint: Path, tmp_path: Path) -> None:
    """The first update comes as tensors, the second as a directory."""
    lengths = (1, 2, 12, 40)
    before = mixed_requests(answered, 4, lengths)
    answered.wait(before)
    newer = load_reference(checkpoint)
    for version, source in enumerate(("tensors", "directory"), start=1):
        perturb(newer, seed=version)
        newer.save_pretrained(tmp_path)
        load = (lambda: as_sent(newer)) if source == "tensors" else (lambda: str(tmp_path))
        answered.engine.update_weights(version, load, flush=True, abort_all=False).result(60)
        after = mixed_requests(answered, 5, lengths)
        answered.wait(after)
        assert worst_difference(newer, after) < TOLERANCE, source
        assert worst_difference(newer, before) > 100 * TOLERANCE, source
        assert {request.weight_version for request in after} == {version}
        before = after[:4]


@each_cache
def test_requests_kept_in_place_over_an_update_never_see_old_keys(answered: Answered, reference: PreTrainedModel, checkpoint: Path) -> None:
    """Old weights score the tokens from before the update, new weights those after it."""
    newer = load_reference(checkpoint)
    perturb(newer)
    requests = [answered.submit([5, 6, number], 100) for number in range(3, 6)]
    wait_begun(requests)
    answered.engine.pause("in_place").result(60)
    num_old = [len(request.output_ids) for request in requests]
    answered.engine.update_weights(1, lambda: as_sent(newer), flush=True, abort_all=False).result(60)
    answered.engine.resume().result(60)
    answered.wait(requests)
    for request, cut in zip(requests, num_old):
        ids = request.output_ids
        early = Request("early", request.input_ids, request.params, frozenset(), 0, output_ids=ids[:cut], logprobs=request.logprobs[:cut])
        late = Request(
            "late", request.input_ids + ids[:cut], request.params, frozenset(), 0, output_ids=ids[cut:], logprobs=request.logprobs[cut:]
        )
        assert worst_difference(reference, [early]) < TOLERANCE
        assert worst_difference(newer, [late]) < TOLERANCE
