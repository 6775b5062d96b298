"""Fixtures of the engine tests: a tiny Qwen3 shared by the tests of the embedded engine."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from fuligo.engines.embedded.kv_cache import KVCache
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.embedded.scheduler import Scheduler
from fuligo.engines.generation import SamplingParams
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def engine_model(checkpoint: Path) -> EngineModel:
    return EngineModel(str(checkpoint), CPU, torch.float32)


@pytest.fixture
def make_scheduler(engine_model: EngineModel) -> Callable[..., Scheduler]:
    def make(max_running_requests: int = 8, max_total_tokens: int = 100_000) -> Scheduler:
        return Scheduler(engine_model, KVCache(engine_model.cache_shape, max_total_tokens, torch.float32, CPU), max_running_requests)

    return make


@pytest.fixture
def make_request(engine_model: EngineModel) -> Callable[..., Request]:
    """Return a request with the given sampling parameters, numbered in order of creation."""
    numbers = itertools.count()

    def make(input_ids: Sequence[int], max_new_tokens: int = 8, *, priority: int = 0, seed: int = 0, **params: object) -> Request:
        number = next(numbers)
        sampling = SamplingParams(max_new_tokens, sampling_seed=seed, **params)
        end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else engine_model.end_ids)
        return Request(f"r{number}", list(input_ids), sampling, end_ids, seed, priority, number)

    return make


@pytest.fixture
def run_all() -> Callable[[Scheduler, Sequence[Request]], list[Request]]:
    """Run requests to their end and return them in the order in which they finished."""

    def run(scheduler: Scheduler, requests: Sequence[Request]) -> list[Request]:
        for request in requests:
            scheduler.enqueue(request)
        ended: list[Request] = []
        while scheduler.waiting or scheduler.num_running:
            ended += scheduler.step()
        return ended

    return run
