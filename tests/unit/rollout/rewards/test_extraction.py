r"""Extraction of the answer from a response, in particular the last `\boxed{}`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.rollout.rewards.extraction import answer_line, deepscaler_answer, last_boxed

PIECE = st.sampled_from(["x", "{", "}", "\\{", "\\}", "\\boxed{", "\\fbox {", "\\\\", " ", "é", "\n"])
BALANCED = st.recursive(
    st.sampled_from(["", "x", "\\{", "\\}", "\\frac", "1,000", "\\\\", "é"]),
    lambda inner: st.lists(inner, max_size=3).map("".join) | inner.map(lambda text: "{" + text + "}"),
    max_leaves=12,
)


@settings(deadline=None)
@given(before=st.lists(PIECE, max_size=12).map("".join), content=BALANCED, after=st.sampled_from(["", " .", "} }", "{", " done \\{"]))
def test_the_last_box_is_found_whatever_surrounds_it(before: str, content: str, after: str) -> None:
    if before.endswith("\\") and not before.endswith("\\\\"):
        before += " "
    assert last_boxed(f"{before} \\boxed{{{content}}}{after}") == content.strip()


def slow_last_boxed(text: str) -> str | None:
    """Apply the definition: from the last opening on, the shortest content whose braces are balanced."""
    starts = [
        position + len(opening)
        for opening in ("\\boxed{", "\\fbox {")
        for position in range(len(text))
        if text.startswith(opening, position)
    ]
    if not starts:
        return None
    start = max(starts)
    for end in range(start, len(text)):
        content = text[start:end].replace("\\\\", "__").replace("\\{", "__").replace("\\}", "__")
        here = text[start : end + 1].replace("\\\\", "__").replace("\\{", "__").replace("\\}", "__")
        if here.endswith("}") and content.count("{") == content.count("}"):
            return text[start:end].strip()
    return None


@settings(deadline=None)
@given(st.lists(PIECE, max_size=20).map("".join))
def test_last_boxed_agrees_with_its_definition_on_any_text(text: str) -> None:
    assert last_boxed(text) == slow_last_boxed(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no box", None),
        (r"\boxed{unfinished", None),
        (r"\boxed{4} then \boxed{5", None),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\frac{1}{2}} and more}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed 7", None),
        ("\\boxed{" * 50_000, None),
        ("\\boxed{" + "{" * 100_000 + "}" * 100_001, "{" * 100_000 + "}" * 100_000),
    ],
)
def test_edges(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


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
    ],
)
def test_dapo_reads_the_last_answer_line_near_the_end(response: str, answer: str | None) -> None:
    assert answer_line(response) == answer
