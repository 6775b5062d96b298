"""Log-probabilities of the response tokens of packed rows against transformers, for all families and layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuligo.trainer.megatron_backend.layout import Layout
from tests import tiny, train_batches
from tests.megatron.policies import megatron_logprobs, settings_of, transformers_logprobs
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 12), (2, 1), (5, 14)]
"""(prompt, response); two micro-batches, of three and of two sequences."""

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp3 uneven": Layout(pp=3, num_layers_first_stage=1, num_layers_last_stage=1, num_ranks=3),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "tp2 pp2": Layout(tp=2, pp=2, num_ranks=4),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = tiny.save_checkpoint(tmp_path_factory.mktemp(family), family, layers=4)
        return made[family]

    return checkpoint


@pytest.mark.parametrize("family", ["qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_are_those_of_transformers(pool: RankPool, checkpoints, family: str, layout: str):
    directory = checkpoints(family)
    samples = train_batches.samples(LENGTHS)
    results = pool.run(LAYOUTS[layout].num_ranks, megatron_logprobs, settings_of(directory, LAYOUTS[layout]), [samples[:3], samples[3:]])
    expected = transformers_logprobs(directory, samples)
    on_last_stage = [result for result in results if result is not None]
    assert len(on_last_stage) == LAYOUTS[layout].num_ranks // LAYOUTS[layout].pp
    for logprobs in on_last_stage:
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
