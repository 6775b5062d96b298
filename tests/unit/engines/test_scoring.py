"""Scoring of given tokens: the answer is checked, and the embedded engine samples nothing."""

from typing import Any

import numpy as np
import pytest

from fuligo.engines.answers import Retryable, parse_scores
from fuligo.engines.embedded.generate_body import parse_requests
from fuligo.engines.embedded.model import EngineModel


def answer(*entries: tuple[float | None, int]) -> dict[str, Any]:
    return {"meta_info": {"input_token_logprobs": [[logprob, token, None] for logprob, token in entries]}}


def test_the_last_entries_are_of_the_scored_tokens() -> None:
    """The first entry belongs to a token for which SGLang reports nothing."""
    logprobs = parse_scores(answer((None, 7), (-0.5, 8), (-1.5, 9)), np.array([8, 9], np.int32))
    np.testing.assert_array_equal(logprobs, np.float32([-0.5, -1.5]))


def test_the_last_id_of_a_vocabulary_is_reported_as_0() -> None:
    np.testing.assert_array_equal(parse_scores(answer((-0.5, 8), (-1.5, 0)), np.array([8, 399], np.int32)), np.float32([-0.5, -1.5]))


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({}, "no log-probabilities"),
        ({"meta_info": {"input_token_logprobs": None}}, "no log-probabilities"),
        (answer((-0.5, 9)), "different tokens"),
        (answer((-0.5, 9), (-0.5, 8)), "different tokens"),
        (answer((None, 8), (-0.5, 9)), "positive or not finite"),
        (answer((-0.5, 8), (0.5, 9)), "positive or not finite"),
    ],
)
def test_an_answer_that_makes_no_sense_is_asked_for_again(broken: Any, text: str) -> None:
    with pytest.raises(Retryable, match=text):
        parse_scores(broken, np.array([8, 9], np.int32))


def test_what_scores_joins_no_batch(engine_model: EngineModel, make_scheduler: Any, make_request: Any) -> None:
    """A scoring request keeps no cache: its answer comes before a token is sampled for others."""
    scheduler = make_scheduler(max_running_requests=1)
    scheduler.enqueue(make_request([5, 6, 7], max_new_tokens=3, ignore_eos=True))
    body = b'{"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}'
    (scoring,), _ = parse_requests(body, engine_model, lambda: None)
    scoring.arrival = 1
    scheduler.enqueue(scoring)
    assert scheduler.step() == [scoring]
    assert (len(scoring.input_logprobs), scoring.output_ids, scheduler.num_running) == (2, [], 1)
