import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.engines.answers import Retryable, WeightLabel, parse_generation
from fuligo.engines.generation import SamplingParams

params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(10, 1000),
    min_new_tokens=st.integers(0, 10),
    temperature=st.floats(0, 4),
    top_p=st.floats(0.01, 1),
    top_k=st.sampled_from([-1, 1, 50]),
    min_p=st.floats(0, 1),
    stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 100), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    sampling_seed=st.none() | st.integers(0, 2**63 - 1),
)


@given(params)
def test_sampling_params_survive_the_wire(given_params: SamplingParams) -> None:
    assert SamplingParams.from_json(given_params.to_json()) == given_params


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 2}, "n is not supported"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"tempreature": 1}, "tempreature is not known"),
        ("hot", "must be an object"),
    ],
)
def test_bad_parameters_are_refused_by_name(body: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams.from_json(body)


def test_one_stop_string_needs_no_list_and_neutral_extras_pass() -> None:
    assert SamplingParams.from_json({"stop": "###", "n": 1, "frequency_penalty": 0.0}).stop == ("###",)


def answer(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
    }
    body: dict[str, Any] = {"text": "ab", "output_ids": [7, 8], "meta_info": meta}
    for key, value in changes.items():
        (body if key in body else meta)[key] = value
    return body


def test_an_answer_becomes_a_generation() -> None:
    generation = parse_generation(answer())
    assert generation.output_ids.tolist() == [7, 8]
    assert generation.logprobs.tolist() == [-0.5, -1.0]
    assert (generation.finish_reason, generation.weight_version, generation.prompt_tokens, generation.cached_tokens) == ("length", 4, 3, 1)


@pytest.mark.parametrize(("reported", "version", "engine"), [("4", 4, None), ("40@2", 40, 2), ("default", 0, None), (7, 7, None)])
def test_an_answer_may_name_its_engine_beside_the_version(reported: Any, version: int, engine: int | None) -> None:
    generation = parse_generation(answer(weight_version=reported))
    assert (generation.weight_version, generation.engine) == (version, engine)


def test_an_answer_may_name_the_version_of_each_token() -> None:
    assert parse_generation(answer()).versions.tolist() == [4, 4]
    versions = parse_generation(answer(token_versions=[3, 4])).versions
    assert versions.tolist() == [3, 4] and versions.dtype == np.int32


@given(st.builds(WeightLabel, st.integers(0, 10**9), st.none() | st.integers(0, 1000), st.none() | st.just("0f" * 16)))
def test_a_label_survives_the_wire(label: WeightLabel) -> None:
    assert WeightLabel.parse(str(label)) == label


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_an_abort_is_an_answer_like_the_others(reason: str) -> None:
    assert parse_generation(answer(finish_reason={"type": reason})).finish_reason == reason


@pytest.mark.parametrize(
    "malformed",
    [
        None,
        [],
        {},
        answer(output_ids=[7]),
        answer(output_ids=[7, 9]),
        answer(output_ids=[7, -8]),
        answer(output_ids="ab"),
        answer(output_token_logprobs=[[None, 7, None], [-1.0, 8, None]]),
        answer(output_token_logprobs=[[0.5, 7, None], [-1.0, 8, None]]),
        answer(output_token_logprobs=None),
        answer(finish_reason={"type": "bored"}),
        answer(finish_reason=None),
        answer(weight_version="new"),
        answer(weight_version="4@new"),
        answer(token_versions=[4]),
        answer(token_versions=[None, 4]),
        answer(output_ids=[7, 2**40], output_token_logprobs=[[-0.5, 7, None], [-1.0, 2**40, None]]),
    ],
)
def test_a_malformed_answer_is_never_taken(malformed: Any) -> None:
    with pytest.raises(Retryable):
        parse_generation(malformed)
