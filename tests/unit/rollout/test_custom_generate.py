"""`--custom-generate-function-path`: arguments, helpers and result of the user's function."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fuligo.engines.generation import SamplingParams
from fuligo.rollout.custom_generate import CustomGenerate, append_observation, continue_sample
from fuligo.rollout.generate import SingleTurn
from fuligo.types import Sample, SampleStatus
from tests.unit.rollout.scripted import ScriptedEngine, Tokenizer, by_row

ARGS = SimpleNamespace(rollout_max_response_len=9)
PARAMS = SamplingParams(max_new_tokens=9, temperature=0.5, stop=("x",), sampling_seed=3)


def fresh(row: int = 0) -> Sample:
    return Sample(4, 2, "prompt", np.array([row], np.int32))


def adapted(hook, engine: ScriptedEngine | None = None) -> CustomGenerate:
    return CustomGenerate(hook, ARGS, SingleTurn(engine or ScriptedEngine(), Tokenizer(), timeout_s=9), policy_version=lambda: 6)


async def test_it_gets_the_flags_and_the_sampling_parameters_by_their_names():
    seen: dict[str, Any] = {}

    async def hook(args, sample, sampling_params):
        seen.update(sampling_params, max=args.rollout_max_response_len)
        sample.status = SampleStatus.COMPLETED
        return sample

    await adapted(hook)(fresh(), PARAMS)
    assert (seen["temperature"], seen["stop"], seen["sampling_seed"], seen["max"]) == (0.5, ["x"], 3, 9)


async def test_lists_become_arrays_and_what_is_missing_is_filled_in():
    async def hook(args, sample, sampling_params):
        sample.response_ids, sample.engine_logprobs = [7, 8], [-0.1, -0.2]
        sample.status = SampleStatus.COMPLETED
        return sample

    (sample,) = await adapted(hook)(fresh(), PARAMS)
    assert sample.response_ids.dtype == np.int32
    assert sample.engine_logprobs.dtype == np.float32
    assert sample.loss_mask.tolist() == [1, 1]
    assert sample.versions.tolist() == [6, 6]


async def test_several_samples_of_one_rollout_keep_its_index():
    async def hook(args, sample, sampling_params):
        return [Sample(index, 99, "part", np.zeros(1, np.int32), status=SampleStatus.COMPLETED) for index in (1, 2)]

    parts = await adapted(hook)(fresh(), PARAMS)
    assert [(part.index, part.group_index) for part in parts] == [(4, 2), (4, 2)]


async def test_tokens_without_log_probabilities_are_refused():
    async def hook(args, sample, sampling_params):
        sample.response_ids = [7, 8]
        return sample

    with pytest.raises(ValueError, match="2 response_ids without engine_logprobs"):
        await adapted(hook)(fresh(), PARAMS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.5, 2.0], "response_ids has the type float64; token ids are integers"),
        ([7, 50], "has values from 7 to 50; the vocabulary has ids 0 to 49"),
        ([-1, 7], "has values from -1 to 7"),
    ],
)
async def test_ids_that_are_no_tokens_are_refused(ids: list, message: str):
    """The trainer would look them up in its embedding."""

    async def hook(args, sample, sampling_params):
        sample.response_ids, sample.engine_logprobs, sample.status = ids, [0.0] * len(ids), SampleStatus.COMPLETED
        return sample

    generate = CustomGenerate(hook, ARGS, SingleTurn(ScriptedEngine(), Tokenizer(), timeout_s=9), policy_version=lambda: 6, vocab_size=50)
    with pytest.raises(ValueError, match=message):
        await generate(fresh(), PARAMS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask": [1, 0.5]}, r"loss_mask has the value 0\.5; only 0 and 1 are valid"),
        ({"loss_mask": [1, 2]}, "loss_mask has the value 2"),
        ({"engine_logprobs": [-0.1, 0.9]}, r"engine_logprobs has the value 0\.9; a log-probability is never positive"),
        ({"status": "done"}, "'done' is not a valid SampleStatus"),
    ],
)
async def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str):
    async def hook(args, sample, sampling_params):
        sample.response_ids, sample.engine_logprobs, sample.status = [7, 8], [-0.1, -0.2], "completed"
        for name, value in changed.items():
            setattr(sample, name, value)
        return sample

    with pytest.raises(ValueError, match=message):
        await adapted(hook)(fresh(), PARAMS)


async def test_a_status_may_be_its_name():
    async def hook(args, sample, sampling_params):
        sample.status = "truncated"
        return sample

    (sample,) = await adapted(hook)(fresh(), PARAMS)
    assert sample.status is SampleStatus.TRUNCATED


async def test_something_else_than_samples_is_refused():
    async def hook(args, sample, sampling_params):
        return {"text": "no"}

    with pytest.raises(TypeError, match="returned dict; return a Sample"):
        await adapted(hook)(fresh(), PARAMS)


async def two_turns(args, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate until the model stops, append the tokens 1 2 3 as an answer, and generate again."""
    sample = await continue_sample(sample, {**sampling_params, "max_new_tokens": 9})
    if sample.status is not SampleStatus.COMPLETED:
        return sample
    append_observation(sample, [1, 2, 3])
    return await continue_sample(sample, {**sampling_params, "max_new_tokens": 9})


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_an_observation_may_be_a_list_an_array_or_a_tensor(convert):
    sample = fresh()
    append_observation(sample, convert([1, 2, 3]))
    assert sample.response_ids.tolist() == [1, 2, 3]
    assert sample.response_ids.dtype == np.int32
    assert sample.loss_mask.tolist() == [0, 0, 0]


async def test_a_tool_s_answer_stands_in_the_response_and_is_not_trained_on():
    engine = ScriptedEngine(by_row({0: 4}), version=2)
    generate = adapted(two_turns, engine)
    (sample,) = await generate(fresh(), PARAMS)
    assert sample.response_length == 9
    assert sample.response_ids[4:7].tolist() == [1, 2, 3]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert sample.engine_logprobs.tolist() == [-0.5] * 4 + [0.0] * 3 + [-0.5] * 2
    assert sample.versions.tolist() == [2] * 9
    assert sample.status is SampleStatus.TRUNCATED
    assert [params.max_new_tokens for _, params in engine.requests] == [9, 2]


async def test_samples_of_concurrent_functions_do_not_mix():
    engine = ScriptedEngine(by_row({0: 3, 1: 5}))
    generate = adapted(two_turns, engine)
    first, second = await asyncio.gather(generate(fresh(0), PARAMS), generate(fresh(1), SamplingParams(max_new_tokens=9, temperature=2)))
    assert {params.temperature for _, params in engine.requests} == {0.5, 2}
    assert [first[0].loss_mask.tolist().index(0), second[0].loss_mask.tolist().index(0)] == [3, 5]
