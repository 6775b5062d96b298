"""Extraction of the answer as DeepScaleR and DAPO do it."""

import pytest

from fuligo.rollout.rewards.extraction import answer_line, deepscaler_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"thoughts </think> so \boxed{4}", "4"),
        (r"\boxed{3} </think> a </think> \boxed{4}", "4"),
        (r"### ###Response \boxed{4}", "4"),
        (r"\boxed{4}", None),
        (r"\boxed{4} </think> four", None),
        ("</think>", None),
    ],
)
def test_deepscaler_reads_only_what_follows_the_thinking(response: str, answer: str | None) -> None:
    assert deepscaler_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 42", "42"),
        ("answer : 41\nso\nANSWER:42 apples\nbye", "42 apples"),
        ("Answer: 42" + "." * 301, None),
        ("Answer: 41" + "." * 295 + "\nAnswer:\n42", "42"),
        ("the answer is 42", None),
        ("Answer: 18.", "18"),
        ("**Answer:** 18", "18"),
        ("**Answer: 18**", "18"),
        ("Answer: ", None),
        ("Answer:  \nbye", "bye"),
    ],
)
def test_dapo_reads_the_last_answer_line_near_the_end(response: str, answer: str | None) -> None:
    assert answer_line(response) == answer
