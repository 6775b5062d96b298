"""Plain numbers are exact; a decimal with at least six digits equals every number that it is a rounding of."""

import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.answers.number import Number, equal_numbers, read_based, read_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-42", -42),
        ("+5", 5),
        ("007", 7),
        ("42.", 42),
        (".5", Fraction(1, 2)),
        ("2.50", Fraction(5, 2)),
        ("1,234", 1234),
        ("1 234", 1234),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("5e3", 5000),
        ("1e-3", Fraction(1, 1000)),
        ("1.5E+2", 150),
        (r"6.5\times 10^{-2}", Fraction(65, 1000)),
        (r"3\cdot 10^8", 3 * 10**8),
        ("10^{6}", 10**6),
        ("1/3", Fraction(1, 3)),
        ("-1/3", Fraction(-1, 3)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"\frac{-1}{3}", Fraction(-1, 3)),
        ("2 1/2", Fraction(5, 2)),
        (r"-2\frac{1}{2}", Fraction(-5, 2)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("2.5 million", 2_500_000),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Fraction) -> None:
    number = read_number(text)
    assert number is not None and number.value == value


@pytest.mark.parametrize(
    "text", ["", "x", "1,23", "12,34,567", "1.2.3", "1/0", "5 6", "1 2 3", "9**9", "١٢", "1e999999999", "1" * 500, "2x", "-", ".", "e5"]
)
def test_other_texts_are_no_numbers(text: str) -> None:
    assert read_number(text) is None


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**20), max_value=10**20))
def test_thousands_separators_and_trailing_zeros_do_not_matter(value: Decimal) -> None:
    assert equal_numbers(_read(f"{value:,}"), _read(f"{value}000"))
    assert not equal_numbers(_read(f"{value + 1:,}"), _read(str(value)))


@given(value=st.fractions(min_value=Fraction(1, 10**9), max_value=10**9), places=st.integers(0, 25))
def test_only_a_rounding_to_six_digits_or_more_equals_another_number(value: Fraction, places: int) -> None:
    exact = Number(value)
    rounded = _read(f"{Decimal(value.numerator) / Decimal(value.denominator):.{places}f}")
    if rounded.value == value:
        return
    assert equal_numbers(rounded, exact) == (rounded.num_digits >= 6)
    off = Number(rounded.value + (rounded.unit_in_last_place or 1), rounded.unit_in_last_place, rounded.num_digits)
    assert not equal_numbers(off, exact) or rounded.num_digits >= 15


@given(value=st.fractions(min_value=Fraction(1, 10**40), max_value=Fraction(1, 10**5)))
def test_nothing_rounds_to_zero(value: Fraction) -> None:
    for zero in ("0", "0.0", "0.000000", "0.0000000000000000000"):
        assert not equal_numbers(_read(zero), Number(value))


@given(value=st.integers(0, 10**12), base=st.integers(2, 9))
def test_a_number_is_read_in_its_base(value: int, base: int) -> None:
    digits, rest = "", value
    while rest or not digits:
        digits, rest = str(rest % base) + digits, rest // base
    assert read_based(f"{digits}_{base}") == read_based(f"({digits})_{{{base}}}") == (value, base)
    assert read_based(f"{digits}9_{base}") is None


def test_comparing_plain_numbers_imports_neither_sympy_nor_torch() -> None:
    code = (
        "import sys; import fuligo.rollout.rewards; from fuligo.answers.equality import equal_answers; equal_answers('1,2', '2,1');"
        "print({'sympy', 'latex2sympy2_extended', 'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "set()"


def _read(text: str) -> Number:
    number = read_number(text)
    assert number is not None, text
    return number
