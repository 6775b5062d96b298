"""Checks that trainer and engines have the same weights."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fuligo.engines.generation import SamplingParams
from fuligo.errors import WeightSyncError
from fuligo.formats.weight_manifest import WeightManifest
from fuligo.types import TrainSample
from fuligo.weights.proof import LogprobProof

MANIFEST = WeightManifest(3, 1, 4, None, 4)


class Engine:
    url = "http://engine"

    async def generate(self, prompt: np.ndarray, params: SamplingParams, *, rid: str) -> Any:
        return SimpleNamespace(output_ids=prompt[: params.max_new_tokens], logprobs=np.full(len(prompt), -1.5, np.float32))


class Trainer:
    def __init__(self, logprob: float = -1.5) -> None:
        self.logprob = logprob
        self.num_scored = 0

    async def logprobs(self, samples: list[TrainSample]) -> list[np.ndarray]:
        self.num_scored += len(samples)
        return [np.full(sample.response_length, self.logprob, np.float32) for sample in samples]


def group(*, split: bool = False, size: int = 1) -> Any:
    engines = [Engine() for _ in range(size)]
    return SimpleNamespace(clients=engines, answering=engines[:1] if split else engines, split=split)


def proof(trainer: Trainer, *, num_replicas: int = 1) -> LogprobProof:
    return LogprobProof(trainer, temperature=1.0, vocab_size=100, tolerance=0.01, num_replicas=num_replicas)


@pytest.mark.parametrize(
    ("num_replicas", "engines", "num_probes"), [(1, group(), 8), (32, group(), 32), (4, group(split=True, size=3), 24)]
)
async def test_each_replica_of_the_trainer_has_something_to_score(num_replicas: int, engines: Any, num_probes: int) -> None:
    trainer = Trainer()
    await proof(trainer, num_replicas=num_replicas).check(engines, MANIFEST)
    assert trainer.num_scored == num_probes


async def test_an_engine_that_computes_something_else_is_named() -> None:
    with pytest.raises(WeightSyncError, match=r"version 3 .* engine http://engine and of the trainer differ by 0\.5 on average over 256"):
        await proof(Trainer(-2.0)).check(group(), MANIFEST)
