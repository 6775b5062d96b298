"""Seeds: one stream of random numbers per sample."""

import asyncio

from fuligo.engines.generation import SamplingParams
from fuligo.rollout.generate import SingleTurn
from fuligo.rollout.sampler import Sampler, Turns, sampling_seed
from fuligo.types import Sample
from tests.unit.rollout.scripted import Rows, ScriptedEngine, Tokenizer


def test_seeds_differ_by_run_stream_and_sample_and_fit_a_signed_64_bit_integer():
    seeds = [sampling_seed(run, stream, index) for run in (1, 2) for stream in ("train", "eval/a") for index in range(1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process():
    assert sampling_seed(42, "train", 0) == 3486790870858846036


async def test_a_continued_sample_stays_on_its_stream():
    engine = ScriptedEngine(lambda row, index: 50)
    sampler = Sampler(SingleTurn(engine, Tokenizer(), timeout_s=9), seed=1, stream="train", turns=Turns(1), timeout_s=9)
    (prompt,) = Rows().take(1)
    sample = Sample(5, 0, prompt.prompt, prompt.prompt_ids)
    task = asyncio.create_task(sampler.sample(sample, SamplingParams(max_new_tokens=99)))
    await engine.until(lambda: engine.num_running > 0)
    await engine.abort_all()
    (sample,) = await task
    await sampler.sample(sample, SamplingParams(max_new_tokens=99))
    assert [params.sampling_seed for _, params in engine.requests] == [sampling_seed(1, "train", 5)] * 2
