"""Log-probabilities of the embedded engine against the torch trainer's: bit for bit equal with batch-invariant operations."""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.model import DTYPES, EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.generation import SamplingParams
from fuligo.trainer.batch import pack_tokens
from fuligo.trainer.shared_prefixes import find_shared_prefixes
from fuligo.trainer.torch_backend.model import Policy, load_model
from fuligo.trainer.torch_backend.weights import named_weights
from fuligo.types import FloatArray, TrainSample
from tests import tiny
from tests.megatron.checkpoints import expert_by_expert

TEMPERATURE = 0.7
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {},
}


class Sampler:
    """Engine whose finished requests can be awaited."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, *, is_batch_invariant: bool = True) -> None:
        self.engine = EmbeddedEngine(
            EngineModel(str(checkpoint), torch.device("cpu"), dtype, is_batch_invariant=is_batch_invariant),
            max_running_requests=6,
            max_total_tokens=16384,
            on_ended=lambda requests: [request.waiter.set_result(request) for request in requests] and None,
            on_failure=lambda: None,
        )
        self.engine.thread.start()

    def submit(self, input_ids: Sequence[int], max_new_tokens: int) -> Request:
        params = SamplingParams(max_new_tokens, temperature=TEMPERATURE)
        request = Request("r", list(input_ids), params, frozenset(), seed=len(input_ids) + max_new_tokens, waiter=Future())
        self.engine.submit(request)
        return request

    def mixed(self, number: int = 14) -> list[Request]:
        """Send more requests than rows, of mixed lengths, of which a third have a prompt that is computed once."""
        rng = random.Random(0)
        common = [rng.randrange(3, 400) for _ in range(20)]
        prompts = [common if i % 3 == 0 else [rng.randrange(3, 400) for _ in range(rng.choice([1, 2, 31, 33, 60]))] for i in range(number)]
        return [self.submit(prompt, rng.choice([1, 2, 12, 40, 90])) for prompt in prompts]


def wait(requests: Sequence[Request]) -> None:
    for request in requests:
        request.waiter.result(timeout=120)
        assert request.error is None


def trainer_policy(checkpoint: Path, dtype: torch.dtype, *, is_batch_invariant: bool = True) -> Policy:
    policy = Policy(load_model(checkpoint), temperature=TEMPERATURE, chunk_tokens=50)
    if is_batch_invariant:
        policy.make_batch_invariant("cpu")
    for parameter in policy.parameters():  # buffers, such as rotary frequencies, stay float32, as FSDP leaves them
        parameter.data = parameter.data.to(dtype)
    return policy


def as_sample(index: int, request: Request) -> TrainSample:
    num_tokens = len(request.output_ids)
    return TrainSample(
        index=index,
        group_index=index,
        tokens=np.array([*request.input_ids, *request.output_ids], np.int32),
        prompt_length=len(request.input_ids),
        loss_mask=np.ones(num_tokens, np.int8),
        reward=0.0,
        engine_logprobs=np.array(request.logprobs, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        mask_sum=float(num_tokens),
    )


def largest_difference(policy: Policy, requests: Sequence[Request], num_rows: int = 3) -> float:
    """Return the largest difference over `num_rows` packings of the samples, in other orders and with other neighbors."""
    rng = random.Random(1)
    samples = [as_sample(index, request) for index, request in enumerate(requests)]
    differences: list[float] = []
    for number in range(num_rows):
        rng.shuffle(samples)
        size = max(1, len(samples) >> number)
        for start in range(0, len(samples), size):
            differences += differences_of(policy, samples[start : start + size])
    return max(differences)


def differences_in_tree(policy: Policy, requests: Sequence[Request]) -> Iterator[float]:
    """Yield the differences where the samples are one row that holds their common prompt once."""
    samples = [as_sample(index, request) for index, request in enumerate(requests)]
    found = find_shared_prefixes([sample.tokens[:-1] for sample in samples])
    assert sum(found.shared) >= 60
    yield from differences_of(policy, [samples[i] for i in found.order], shared=found.shared)


def differences_of(policy: Policy, samples: Sequence[TrainSample], shared: Sequence[int] = ()) -> Iterator[float]:
    tokens = pack_tokens(samples, torch.device("cpu"), shared=shared)
    with torch.enable_grad():
        logprobs: FloatArray = policy(tokens).logprobs.detach().numpy()
    ends = np.cumsum(tokens.response_lengths)[:-1]
    for sample, own in zip(samples, np.split(logprobs, ends), strict=True):
        yield float(np.abs(own - sample.engine_logprobs).max())


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])


CASES = [("qwen3", "bf16"), ("llama", "fp32"), ("qwen3_moe", "fp32"), ("qwen3_moe", "bf16")]
"""All operations, and both precisions of dense layers and of experts, which all families share; the other pairs are slow.

Of the biases of `llama`, `qwen2` has some.
"""
PAIRS = [pytest.param(*pair, marks=[] if pair in CASES else pytest.mark.slow) for pair in itertools.product(FAMILIES, ("fp32", "bf16"))]


@pytest.mark.parametrize(("checkpoint", "precision"), PAIRS, indirect=["checkpoint"])
def test_trainer_equals_engine(checkpoint: Path, precision: str) -> None:
    """Prompts that are copied, rows that join, leave and outgrow their pool, responses that are interrupted and continued, new weights."""
    dtype = DTYPES[precision]
    sampler, policy = Sampler(checkpoint, dtype), trainer_policy(checkpoint, dtype)
    try:
        requests = sampler.mixed()
        wait(requests)
        assert largest_difference(policy, requests) == 0.0
        assert max(differences_in_tree(policy, requests)) == 0.0
        started = [sampler.submit([5, 6, number], 600) for number in range(3, 7)]
        deadline = time.monotonic() + 120
        while any(len(request.output_ids) < 40 for request in started):
            assert time.monotonic() < deadline, "the engine does not decode"
            time.sleep(0.001)
        sampler.engine.pause("abort").result(60)
        wait(started)
        sampler.engine.resume().result(60)
        continued = [sampler.submit([*request.input_ids, *request.output_ids], 20) for request in started]
        wait(continued)
        assert largest_difference(policy, [*started, *continued], num_rows=2) == 0.0
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        weights = list(expert_by_expert(dict(named_weights(policy.model, dtype=dtype))).items())
        sampler.engine.update_weights(1, lambda: weights, flush=True, abort_all=False).result(60)
        newer = sampler.mixed(6)
        wait(newer)
        assert largest_difference(policy, newer, num_rows=2) == 0.0
        assert largest_difference(policy, requests, num_rows=1) > 0.0
    finally:
        sampler.engine.thread.stop()


def test_ordinary_operations_differ(checkpoint: Path) -> None:
    """Equality in the test above is not a coincidence."""
    sampler = Sampler(checkpoint, torch.float32, is_batch_invariant=False)
    try:
        requests = sampler.mixed()
        wait(requests)
    finally:
        sampler.engine.thread.stop()
    difference = largest_difference(trainer_policy(checkpoint, torch.float32, is_batch_invariant=False), requests)
    assert 0.0 < difference < 1e-4
