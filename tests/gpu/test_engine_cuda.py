"""The embedded engine on a GPU samples from the distribution that it reports."""

import random
from concurrent.futures import Future
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.generation import SamplingParams

NUM_REQUESTS = 40


def sampled(checkpoint: Path, dtype: torch.dtype) -> list[Request]:
    """Return finished requests of mixed lengths, more than run at a time."""
    engine = EmbeddedEngine(
        EngineModel(str(checkpoint), torch.device("cuda"), dtype),
        max_running_requests=16,
        max_total_tokens=16384,
        on_ended=lambda requests: [request.waiter.set_result(request) for request in requests] and None,
        on_failure=lambda: None,
    )
    engine.thread.start()
    rng = random.Random(0)
    requests = [
        Request(
            f"r{index}",
            [rng.randrange(7, 330) for _ in range(rng.randrange(3, 60))],
            SamplingParams(rng.randrange(4, 80), ignore_eos=True),
            frozenset(),
            seed=index,
            waiter=Future(),
        )
        for index in range(NUM_REQUESTS)
    ]
    for request in requests:
        engine.submit(request)
    for request in requests:
        request.waiter.result(timeout=300)
        assert request.error is None
    engine.thread.stop()
    return requests


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, request: Request) -> torch.Tensor:
    ids = torch.tensor([request.input_ids + request.output_ids], device="cuda")
    log_softmax = model(ids).logits[0, :-1].float().log_softmax(-1)
    return log_softmax.gather(1, ids[0, 1:, None])[-len(request.output_ids) :, 0].cpu()


def differences(checkpoint: Path, dtype: torch.dtype, requests: list[Request], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """Return log-probabilities of all tokens from transformers' eager forward pass in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").cuda().eval()
    return torch.cat([(plain_logprobs(model, request) - ours).abs() for request, ours in zip(requests, logprobs, strict=True)])


def test_float32_logprobs_equal_a_plain_forward(checkpoint: Path) -> None:
    requests = sampled(checkpoint, torch.float32)
    assert [len(request.output_ids) for request in requests] == [request.params.max_new_tokens for request in requests]
    assert differences(checkpoint, torch.float32, requests, [torch.tensor(request.logprobs) for request in requests]).max() < 1e-4


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(checkpoint: Path) -> None:
    requests = sampled(checkpoint, torch.bfloat16)
    ours = differences(checkpoint, torch.float32, requests, [torch.tensor(request.logprobs) for request in requests])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation="eager").cuda().eval()
    theirs = differences(checkpoint, torch.float32, requests, [plain_logprobs(model, request) for request in requests])
    assert ours.mean() <= 1.3 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()
