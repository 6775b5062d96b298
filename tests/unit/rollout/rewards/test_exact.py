"""Exact comparison agrees with math-verify wherever it decides."""

import subprocess
import sys
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.rollout.rewards import symbolic_judge
from fuligo.rollout.rewards.exact import equal_exactly, nothing_to_find

NUMBER = (
    st.integers(-2000, 2000).map(str)
    | st.decimals(-50, 50, places=2).map(str)
    | st.sampled_from(["1,234", "1234", "1234.0", "007", "7", "-0", "0"])
)


@settings(deadline=None)
@given(answer=NUMBER, gold=NUMBER)
def test_numbers_are_compared_as_math_verify_compares_them(answer: str, gold: str) -> None:
    verdict = equal_exactly(answer, gold)
    assert verdict is not None
    assert verdict == symbolic_judge.judge(answer, [gold], is_text=False)


@settings(deadline=None)
@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**20), max_value=10**20))
def test_thousands_separators_and_trailing_zeros_do_not_matter(value: Decimal) -> None:
    assert equal_exactly(f"{value:,}", f"${value}000$")
    assert equal_exactly(f"{value + 1:,}", str(value)) is False


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        (" 42 ", "42", True),
        ("$42$", "42", True),
        ("\\frac{1}{2}", "\\frac{1}{2}", True),
        ("", "42", False),
        ("42", "", False),
        ("1,23", "123", None),
        ("42.", "42", True),
        ("\\frac12", "0.5", None),
        ("forty-two", "42", None),
        ("3.0000001", "3", None),
        ("1" * 5000, "1", None),
        ("١٢", "12", None),
        ("9**9**9**9", "5", None),
    ],
)
def test_comparisons_that_take_algebra_are_left_undecided(answer: str, gold: str, verdict: bool | None) -> None:
    assert equal_exactly(answer, gold) is verdict


@settings(deadline=None)
@given(st.text(max_size=60))
def test_text_without_digits_or_formulas_holds_nothing_that_math_verify_finds(text: str) -> None:
    from math_verify import parse

    if nothing_to_find(text):
        assert parse(text, parsing_timeout=None) == []


def test_judging_plain_numbers_imports_neither_sympy_nor_torch() -> None:
    code = "import sys; import fuligo.rollout.rewards; print({'sympy', 'math_verify', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "set()"
