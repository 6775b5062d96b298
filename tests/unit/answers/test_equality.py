r"""Answers that are equal and answers that are not. Each case is (answer, label), and the name of its list gives the direction."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.answers.algebra import equal_expressions
from fuligo.answers.equality import NeedsAlgebraError, equal_answers

REPORTED_WRONG = [
    ("0.0", r"6.626\times10^{-34}"),
    ("0.0", r"\frac{1}{2598960}"),
    ("1.6e-19", "9.1e-31"),
    ("0.0000001", "0.0000004"),
    ("BAC", "ABC"),
    ("101_2", "101"),
    ("101_2", "101_3"),
    ("1,1,2", "1,2,2"),
    ("2,2", "2"),
    ("(1,2)", "2,1"),
    ("(2,1)", "x=1,y=2"),
    ("3 hours 20 minutes", "3"),
    (r"7\text{ kg}", r"7\text{ g}"),
    ("5 = 6", "6"),
    ("5 or 6 or 7", "5"),
]
"""Accepted once: the answer is wrong for the label."""

REPORTED_RIGHT = [
    ("5e3", "5000"),
    ("1e-3", "0.001"),
    ("1 234", "1234"),
    (r"3,000\%", "3000"),
    (r"-10\%", "-10"),
    ("18 eggs", "18"),
    ("½", "0.5"),
    ("½", r"\frac12"),
    ("√2", r"\sqrt{2}"),
    ("x²", "x^2"),
    ("∞", r"\infty"),
    (r"1\,000", "1000"),
    (r"0.\overline{3}", "1/3"),
    ("5 km/h", "5"),
    ("x>2", r"(2,\infty)"),
]
"""Rejected once: the answer is right for the label."""

WRONG = [
    ("0.000001", r"\frac{1}{2598960}"),
    ("1000001", "1000000"),
    ("3.0000001", "3"),
    ("1234567.8", "1234567.9"),
    ("2,1", "(1,2)"),
    (r"\{1,2\}", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("x>2", r"[2,\infty)"),
    ("x<2", r"(2,\infty)"),
    ("y=5", "x=5"),
    ("x=1,y=2", "x=2,y=1"),
    ("2x+1", "2x-1"),
    ("0.33", r"\frac13"),
    (r"0.5\%", r"50\%"),
    ("7x", "7"),
    ("-5", "5"),
    ("ab", "a"),
    (r"\sqrt{3}", r"\sqrt{2}"),
    ("2^3", "3^2"),
    ("x^2", "x^3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("5 miles", "5 km"),
    ("100", "1"),
    ("1,2", "12"),
    ("1,23", "123"),
    ("12", "1,2"),
    ("|x|", "x"),
    ("east", "seat"),
    ("5!", "5"),
    ("5,", "5,6"),
    ("3:4", "4:3"),
    ("3:45", "3"),
    ("10^{-6}", "0"),
    ("0", "10^{-9}"),
    ("2 or 3", "2"),
    ("5%", r"5\text{ kg}"),
    ("x=5 or x=6", "5"),
    ("5 = 5 = 6", "6"),
    ("x = 5 = 6", "6"),
    ("(1,2,3)", "(1,2)"),
    (r"\{1,1,3\}", r"\{1,3,3,4\}"),
    ("1/0", r"\infty"),
    (r"\infty", r"-\infty"),
    ("3.14", r"\pi"),
    ("22/7", r"\pi"),
    ("1.41", r"\sqrt2"),
    (r"2\pi", r"\pi"),
    ("AB", "BA"),
    ("7 apples", "7 oranges"),
    (r"\text{yes}", r"\text{no}"),
    ("y=2x+1", "y=2x-1"),
    ("2x", "x"),
    (r"\frac{1}{2}", "2"),
    ("1e3", "1e4"),
    ("5 6", "56"),
    ("1 2 3", "123"),
    ("a=1,b=2", "2,1"),
    (r"\frac{40}{7} \approx 13.33", r"\frac{40}{3} \approx 13.33"),
    ("12:00", "1:00"),
    (r"5\%", r"5\text{ kg}"),
    ("$-5$", "5"),
    ("(5)_{8}", "5"),
    ("5", "101_2"),
    ("x>2", "y>2"),
    ("(2,5]", "(2,5)"),
    ("{1,2}", "1"),
    ("3 hours 20 minutes", "3 hours"),
    ("7 kg", "7 g"),
    ("7 m", "7m^2"),
    ("10 cm", "10 cm^2"),
    ("i", "1"),
    ("2+3i", "2-3i"),
    ("e", "2"),
    ("x", "y"),
    ("no", "yes"),
    ("ABCD", "ABDC"),
    (r"\{\}", "0"),
    ("17", "71"),
    ("5x=10", "2"),
    (r"\sum_{k=1}^{\infty} \frac{\cos(kx)}{k^2}", r"\frac{x^2}{4}"),
    (r"\prod_{n=2}^{\infty} \left(1-\frac{1}{n^2}\right)", r"\frac13"),
    (r"\sum_{n=1}^{\infty} \frac{x^n}{n^2}", "x"),
    (r"\sum_{k=1}^{n} k", r"\frac{n(n-1)}{2}"),
    ("2^{100}", "1267650600228229401496703205377"),
    (r"\$5", "5 cents"),
    (r"\begin{pmatrix}1&2\end{pmatrix}^{x}", r"\frac{x}{2}"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    (r"5\text{ euros}", r"\$5"),
]
"""The answer is wrong for the label."""

RIGHT = [
    ("1/3", "0.333333"),
    ("0.5", r"\frac{1}{2}"),
    (r"50\%", "0.5"),
    (r"50\%", r"\frac12"),
    ("2,1", "1,2"),
    ("x=2,x=1", "1,2"),
    ("x=1,y=2", "y=2,x=1"),
    ("1,2", "x=1,y=2"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("(1,2)", "1,2"),
    ("$18$", "18"),
    (r"\$18", "18"),
    ("18 dollars", r"\$18"),
    ("18.00", "18"),
    ("x+1", "1+x"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("3.141593", r"\pi"),
    ("2+3=5", "5"),
    (r"\text{east}", "East"),
    (r"\text{(A)}", "A"),
    (r"90^\circ", "90"),
    ("90°", r"90^\circ"),
    (r"2\frac12", "2.5"),
    ("2 1/2", "5/2"),
    ("y=2x+1", "2x-y+1=0"),
    ("y = 2x + 1", "2x+1"),
    ("2<x<5", "(2,5)"),
    (r"x\in(2,5)", "(2,5)"),
    ("x<1 or x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"\{2,1\}", "1,2"),
    ("5 and 6", "5,6"),
    ("$5$ or $6$", "6, 5"),
    ("1,234,567", "1234567"),
    ("10^6", "1000000"),
    ("1 million", "1000000"),
    ("2i+1", "1+2i"),
    (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\dfrac{3}{4}", "0.75"),
    (r"\left(1,2\right)", "(1,2)"),
    ("**18**", "18"),
    ("18.", "18"),
    ("a_{1}", "a_1"),
    ("7 kg", r"7\text{ kilograms}"),
    (r"\log_2 8", "3"),
    ("5!", "120"),
    (r"\binom{5}{2}", "10"),
    ("e^{2x}", "(e^x)^2"),
    (r"x \geq 3", r"[3,\infty)"),
    (r"3\le x", r"x\ge3"),
    ("ab", "ba"),
    ("101_2", "(101)_{2}"),
    ("101_{2}", r"101_{\text{two}}"),
    ("0.1", r"\frac{1}{10}"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", r"-\frac12"),
    (r"3\times10^8", "300000000"),
    ("12 cm^2", r"12\text{ cm}^2"),
    ("12 CM^2", "12 cm^2"),
    ("12", r"12\text{ square units}"),
    (r"\pi r^2", r"r^2\pi"),
    ("x = 1, 2", "1,2"),
    ("(x,y)=(1,2)", "(1,2)"),
    ("x=1, y=2", "(1,2)"),
    ("A = 5", "5"),
    (r"\text{Area} = 5", "5"),
    ("f(x)=x+1", "x+1"),
    (r"\frac{x}{2}", "0.5x"),
    ("6x^2", r"6\cdot x\cdot x"),
    (r"\sqrt[3]{8}", "2"),
    ("1{,}000", "1000"),
    (r"1,\!000", "1000"),
    ("0.30000000000000004", "0.3"),
    ("no solution", "No solution."),
    ("x^{1/2}", r"\sqrt{x}"),
    (r"\ln(4)", r"2\ln 2"),
    ("3x+2y=6", "6x+4y=12"),
    (r"30\text{ min}", "30 minutes"),
    ("€5", "5"),
    ("+5", "5"),
    ("n(n+1)/2", r"\frac{n(n+1)}{2}"),
    (r"\tan 45^\circ", r"\tan 45^\circ"),
    (r"\frac{1}{3}\pi", r"\frac{\pi}{3}"),
    (r"\pm 2", "2,-2"),
    (r"2 \pm \sqrt{3}", r"2+\sqrt3, 2-\sqrt3"),
    (r"\cos 2x", r"\cos^2 x-\sin^2 x"),
    (r"\emptyset", r"\varnothing"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    ("１８", "18"),
    ("−5", "-5"),
    ("5 %", r"5\%"),
    (r"\\frac{1}{2}", "0.5"),
    ("1 200 000", "1200000"),
    ("1.5 million dollars", "1500000"),
    (r"\mathrm{e}^2", "e^2"),
    ("x ∈ (2, 5)", "(2,5)"),
    ("2 < x ≤ 5", "(2,5]"),
    ("θ", r"\theta"),
    (r"x=\sqrt{2}\approx 1.414", r"\sqrt{2}"),
    ("1.41421", r"\sqrt{2}"),
    ("p=5,q=2;p=7,q=2", "(5,2),(7,2)"),
    ("AB = 4", "4"),
    ("7:32", "7:32"),
    ("(0;1)", "(0,1)"),
    ("10^{-3}", "0.001"),
    (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\sqrt{-4}", "2i"),
    (r"4\pi", "4π"),
    ("30°", "30"),
    ("5 sq cm", "5 cm^2"),
    ("60 mph", r"60\text{ miles per hour}"),
    ("2x = 0", "x = 0"),
    (r"\sum_{k=1}^{\infty} \frac{\sin k}{k}", r"\frac{\pi-1}{2}"),
    (r"\sum_{k=1}^{\infty} \frac{\cos(kx)}{k^2}", r"\sum_{n=1}^{\infty} \frac{\cos(nx)}{n^2}"),
    (r"\prod_{n=2}^{\infty} \left(1-\frac{1}{n^2}\right)", r"\frac12"),
    (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
    ("2^{100}", "1267650600228229401496703205376"),
    (r"-\$1,000.50", "-1000.5"),
    (r"\$5", "5 USD"),
    ("6.62607 x 10^-34", r"6.62607\times10^{-34}"),
    ("3x10^8", "300000000"),
    (r"\frac\pi4", "pi/4"),
    (r"\frac1\pi", r"1/\pi"),
    (r"\frac{\theta}2", r"\frac\theta2"),
    (r"1,000\text{ kg}", "1000"),
    (r"\begin{pmatrix}x\\2x\end{pmatrix}", r"x\begin{pmatrix}1\\2\end{pmatrix}"),
    ("YES", "yes"),
]
"""The answer is right for the label."""


@pytest.mark.parametrize(("answer", "label"), [*REPORTED_WRONG, *WRONG])
def test_a_wrong_answer_is_rejected(answer: str, label: str) -> None:
    assert not equal_answers(answer, label, equal_expressions)


@pytest.mark.parametrize(("answer", "label"), [*REPORTED_RIGHT, *RIGHT])
def test_a_right_answer_is_accepted(answer: str, label: str) -> None:
    assert equal_answers(answer, label, equal_expressions)


LABELS = sorted({label for _, label in (*REPORTED_RIGHT, *RIGHT) if "\\text{ kg}" not in label})


@pytest.mark.parametrize("label", LABELS)
def test_a_label_equals_itself_in_other_spellings(label: str) -> None:
    for spelled in (f"${label}$", f" {label} ", f"\\({label}\\)", f"**{label}**", label.replace("\\frac", "\\dfrac")):
        assert equal_answers(spelled, label, equal_expressions), spelled


INTEGERS = st.lists(st.integers(-20, 20), min_size=2, max_size=6)


@given(numbers=INTEGERS, data=st.data())
def test_lists_are_compared_with_multiplicity_in_any_order(numbers: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(numbers) | INTEGERS)
    answer, label = ", ".join(map(str, numbers)), ", ".join(map(str, other))
    assert equal_answers(answer, label) == (sorted(numbers) == sorted(other))
    assert equal_answers(f"({answer})", f"({label})") == (numbers == other)
    assert equal_answers(f"\\{{{answer}\\}}", f"\\{{{label}\\}}") == (set(numbers) == set(other))
    assert equal_answers(f"({answer})", label) == (numbers == other)


@settings(deadline=None)
@given(st.text(alphabet="12x,;=<>()[]{}\\ .^_-+%$/or∪½", max_size=40), st.sampled_from(["5", "1,2", "(1,2)", "x=1", "x^2"]))
def test_any_text_is_compared_without_an_error(answer: str, label: str) -> None:
    with suppress(NeedsAlgebraError):
        assert equal_answers(answer, label) in (True, False)


def test_algebra_is_asked_for_only_where_it_decides() -> None:
    for answer, label in (("5", "6"), ("1, 2", "2, 1"), ("5 km", "5 kg"), ("x = 5", "5"), ("east", "west"), ("(1, 2)", "(1, 3)")):
        equal_answers(answer, label)
    with pytest.raises(NeedsAlgebraError):
        equal_answers("x + 1", "1 + x + 0")
