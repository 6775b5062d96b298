r"""The answer that a response states, in particular its last `\boxed{}`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.answers.statement import last_boxed, stated_answer

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
def test_edges_of_boxes(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5} no wait \boxed{6}", "6"),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"$x = \boxed{1}, y = \boxed{2}$", "1, 2"),
        (r"\boxed{5}, again \boxed{5}", "5"),
        (r"\boxed{5} \boxed{5}", "5"),
        (r"\boxed{5} and \boxed{6", None),
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("The answer is 42. I hope it is correct, 7.", "42"),
        ("The answer is 5 or 6 or 7", "5 or 6 or 7"),
        ("5 or 6 or 7", "5 or 6 or 7"),
        ("It must be 5 or 6.", "5 or 6"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("answer: x^2 + 1", "x^2 + 1"),
        ("The answer is Paris.", "Paris"),
        ("So he has 3, 4 and 5 apples.\n#### 12", "12"),
        ("2 * 25 = 50%\nA: 50", "50"),
        ("He pays 7 * 2 = 14 dollars", "14 dollars"),
        ("It weighs 7 kg", "7 kg"),
        ("roots $x=1$ and $x=2$", "$x=1$ and $x=2$"),
        ("we find $y = 3$ for $f$", "$y = 3$"),
        ("Step 1 and step 2 give 1,234.50", "1,234.50"),
        ("who knows", None),
        ("", None),
    ],
)
def test_the_answer_is_found_in_prose(text: str, answer: str | None) -> None:
    assert stated_answer(text) == answer


@settings(deadline=None)
@given(st.text(alphabet="1 x$\\()[]{}.,=answeri or:#\n", max_size=200))
def test_any_text_is_searched_without_an_error(text: str) -> None:
    assert stated_answer(text) is None or isinstance(stated_answer(text), str)
