"""Multiple choice: the letter that a response chooses and the one that is right."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.config.groups import RewardFlags
from fuligo.errors import RewardError
from fuligo.rollout.rewards import RewardRunner
from fuligo.rollout.rewards.gpqa import Question, chosen, gpqa_reward
from fuligo.types import SampleGroup, SampleStatus

TEXTS = ("10 m/s", "10 m", "a large amount", "carbon dioxide")
QUESTION = Question(("A", "B", "C", "D"), TEXTS)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        # 1. the box
        (r"\boxed{C}", "C"),
        (r"The answer is A. \boxed{(C)}", "C"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{\textbf{(c)}}", "C"),
        (r"\boxed{C. a large amount}", "C"),
        (r"\boxed{\text{A large amount}}", "C"),
        (r"\boxed{10~m}, the answer is (B)", "B"),
        (r"\boxed{A} no, \boxed{B}", "B"),
        (r"\boxed{C = 5} is the constant; answer: D", "D"),
        # 2. statements
        ("The answer is C.", "C"),
        ("Answer: (C)", "C"),
        ("ANSWER:C", "C"),
        ("**Answer:** c", "C"),
        ("**Final answer**: **C**", "C"),
        ("Answer:\n\nC) a large amount", "C"),
        ("the correct option is C, since B is too slow", "C"),
        ("The correct choice is therefore option C because A and B are too slow", "C"),
        ("Thus (C) is correct. A and B are too slow.", "C"),
        ("Option B is the right one", "B"),
        ("The answer is A large amount", "C"),
        ("The answer is carbon dioxide, not A", "D"),
        ("Answer: $10$ m/s", "A"),
        ("The answer is not A. I thought the answer is B, but the answer is D.", "D"),
        ("If the answer is A then B follows. Which option is correct? C is correct.", "C"),
        ("The answer is $\\mathbf{D}$", "D"),
        # 3. the last line
        ("A is slow, B is slower.\nSo: C", "C"),
        ("I weigh A against B.\n\n(D)\n", "D"),
        ("C", "C"),
        ("d", "D"),
        # 4. the text
        ("It must be carbon dioxide", "D"),
        ("It is 10 m/s that it moves at.", "A"),
        ("it is 10 m, or it is carbon dioxide", None),
        # no choice
        ("", None),
        ("I do not know", None),
        ("The answer is E", None),
        ("the answer is a mystery", None),
        ("A line without an answer", None),
        ("the C-H bond and C=O are what matters", None),
        (r"\boxed{", None),
        # thinking
        ("The answer is A </think> C", "C"),
        ("the answer is A</think>\nno</think>", None),
    ],
)
def test_chosen_letter_of_a_response(response: str, letter: str | None) -> None:
    assert chosen(response, QUESTION) == letter


def test_without_choices_there_are_ten_letters() -> None:
    assert [gpqa_reward(f"Answer: {letter}", letter, {}) for letter in "ABCDEFGHIJ"] == [1.0] * 10
    assert gpqa_reward("Answer: K", "A", {}) == 0.0
    assert gpqa_reward("I think so", "I", {}) == 0.0


WORDS = st.lists(st.sampled_from(["A", "B", "C", "D", "is", "too", "slow", "the", "(B)", "of", "10 m", "\n", "."]), max_size=12).map(
    " ".join
)
ENDINGS = [
    r"so \boxed{%s}",
    "\nAnswer: %s",
    "\nThe correct answer is (%s), as said.",
    "\nthe correct option is **%s**",
    "\n(%s) is correct",
    "\nFinal answer: %s)",
    "</think>%s",
    "</think>\n**(%s)**\n",
]


@settings(deadline=None, max_examples=60)
@given(reasoning=WORDS, ending=st.sampled_from(ENDINGS), choice=st.sampled_from("ABCD"), right=st.sampled_from("ABCD"))
def test_a_clear_ending_decides_whatever_came_before(reasoning: str, ending: str, choice: str, right: str) -> None:
    assert gpqa_reward(reasoning + " " + ending % choice, right, {"choices": list(TEXTS)}) == float(choice == right)


@settings(deadline=None, max_examples=60)
@given(choices=st.permutations(TEXTS), right=st.integers(0, 3), given_=st.integers(0, 3))
def test_labels_of_every_kind_say_the_same(choices: list[str], right: int, given_: int) -> None:
    letter = "ABCD"[right]
    labels: list[tuple[Any, dict[str, Any]]] = [
        (letter, {}),
        (letter.lower(), {"valid_letters": "ABCD"}),
        (rf"\boxed{{{letter}}}", {}),
        (f"({letter})", {}),
        (right, {}),
        (float(right), {"choices": choices}),
        (choices[right].upper() + ".", {"choices": choices}),
        (choices[right], {"choices": dict(zip("ABCD", choices))}),
        (None, {"correct_letter": letter}),
        (f"because of {choices[right]}", {"correct_letter": letter}),
        ([letter], {"correct_letter": letter.lower(), "choices": choices}),
    ]
    for label, metadata in labels:
        assert gpqa_reward(f"The answer is {'ABCD'[given_]}", label, metadata) == float(right == given_), (label, metadata)


@settings(deadline=None, max_examples=60)
@given(choices=st.permutations(TEXTS), right=st.integers(0, 3))
def test_the_order_of_the_choices_does_not_matter_where_the_text_is_the_answer(choices: list[str], right: int) -> None:
    assert gpqa_reward(f"The answer is {choices[right]}", right, {"choices": choices}) == 1.0
    assert gpqa_reward(f"It is {choices[right]}", choices[right], {"choices": choices}) == 1.0


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=200), st.sampled_from([(), TEXTS, ("", " ", "(", "*")]))
def test_chosen_accepts_any_text(text: str, choices: tuple[str, ...]) -> None:
    assert gpqa_reward(text, 0, {"choices": choices}) in (0.0, 1.0)


def test_several_right_answers_may_be_listed() -> None:
    assert [gpqa_reward(f"Answer: {letter}", ["A", 2], {}) for letter in "ABC"] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("label", "metadata", "text"),
    [
        (None, {}, "says which choice is right"),
        ("K", {}, "must be one of A, B, C"),
        ("E", {"choices": TEXTS}, "must be one of A, B, C, D, or the text of one of 4 choices"),
        ("12 m", {"choices": TEXTS}, "must be one of A, B, C, D"),
        (4, {"choices": TEXTS}, "positions range from 0 to 3"),
        (-1, {}, "positions range from 0 to 9"),
        (1.5, {}, "must be one of A"),
        (True, {}, "a label must be a string"),
        ([], {}, "empty list"),
        ("A", {"correct_letter": "B"}, r'the label says A but metadata\["correct_letter"\] says B'),
        ("A", {"choices": TEXTS, "valid_letters": ["A", "B"]}, "4 choices cannot have the letters A, B"),
        ("A", {"choices": "abc"}, "must be lists"),
        ("A", {"valid_letters": ["A", "BB"]}, "each choice needs one letter from A to Z"),
    ],
)
def test_rows_without_a_right_choice_fail_with_the_reason(label: Any, metadata: dict[str, Any], text: str) -> None:
    with pytest.raises(RewardError, match=text):
        gpqa_reward("Answer: A", label, metadata)


async def test_the_runner_judges_by_it_also_in_the_box_alone(make_group: Callable[..., SampleGroup]) -> None:
    async with RewardRunner(RewardFlags(rm_type="gpqa")) as runner:
        group = make_group("Answer: C", r"Answer: C \boxed{B}", label=2, choices=list(TEXTS))
        boxed = make_group("Answer: C", r"Answer: B \boxed{\text{a large amount}}", label="C", choices=list(TEXTS), rm_type="boxed_gpqa")
        broken = make_group("Answer: C", label="Z")
        for each in (group, boxed, broken):
            await runner(each)
    assert [sample.reward for sample in (*group.samples, *boxed.samples)] == [1.0, 0.0, 0.0, 1.0]
    assert broken.samples[0].status is SampleStatus.FAILED and "the label is 'Z'" in str(broken.samples[0].error)
