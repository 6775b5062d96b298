r"""Algebraic equality with sympy; latex2sympy2 (of math-verify) parses the LaTeX.

Two expressions are equal if their values are equal. Values are computed exactly if rational, else with 40 digits; expressions with symbols
are evaluated at random points. Only expressions without a numerical value (such as some integrals and sums) are simplified instead, because
simplification is slow and fails silently.
"""

import random
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from mpmath.libmp import NoConvergence
from sympy import Float, I, Integer, Product, Rational, Sum, cos, nan, oo, simplify, sin, zoo

from fuligo.answers.number import read_number, rounds

_DIGITS = 40
_TOLERANCE = Fraction(1, 10**25)
_POINTS = 4


def equal_expressions(first: str, second: str) -> bool:
    """Return whether two expressions are equal; False if sympy cannot compute one, such as a power of a matrix that is not square.

    If `second` ends with `=0`, return whether `first` is a constant, nonzero multiple of its left side. If one of the two cannot be parsed,
    compare their texts, without regard to case, spaces and braces. Raises RecursionError if an expression is nested too deeply to compute.
    """
    try:
        proportional = second.endswith("=0")
        left, right = _parsed(first), _parsed(second.removesuffix("=0"))
        if left is None or right is None:
            return _squeezed(first) == _squeezed(second)
        if proportional:
            return _are_proportional(left, right)
        if hasattr(left, "shape") or hasattr(right, "shape"):
            if getattr(left, "shape", None) != getattr(right, "shape", None):
                return False
            return all(
                _equal_values(str(one), one, str(other), other)
                for one, other in zip(*(sympy.Matrix(side.doit()) for side in (left, right)), strict=True)
            )
        return _equal_values(first, left, second, right)
    except RecursionError:
        raise
    except Exception:  # sympy raises many types, and an answer that makes it raise is wrong
        return False


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Return the sympy expression of a text, with complex symbols and `i` as the imaginary unit; None if it cannot be parsed."""
    if (number := read_number(text)) is not None:
        return Rational(number.value.numerator, number.value.denominator)
    try:
        parsed: Any = latex2sympy(text, is_real=False, convert_degrees=False, normalization_config=None)
    except Exception:
        return None
    if not hasattr(parsed, "free_symbols"):
        return None
    return parsed.xreplace({symbol: I for symbol in parsed.free_symbols if symbol.name == "i"})


def _squeezed(text: str) -> str:
    return "".join(text.replace("{", "").replace("}", "").split()).casefold()


def _equal_values(first: str, left: Any, second: str, right: Any) -> bool:
    if left.has(sympy.zoo, sympy.nan) or right.has(sympy.zoo, sympy.nan):
        return False
    if left == right:
        return True
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return False
    if sympy.oo in (left, right) or -sympy.oo in (left, right):
        return left.doit() == right.doit()
    symbols = sorted(_names(left) | _names(right))
    counts = _bounds(left) | _bounds(right)
    rng = random.Random(0)
    known: list[bool] = []
    for place in range(_POINTS if symbols else 1):
        point = {name: sympy.Integer(3 + 4 * place) if name in counts else _random_point(rng, place) for name in symbols}
        verdict = _equal_at(point, left, right)
        known += [] if verdict is None else [verdict]
        if verdict is False:
            break
    if not known:
        return simplify(left - right) == 0  # pyrefly: ignore[unsupported-operation]
    if all(known):
        return True
    return not symbols and _rounded(first, left, second, right)


def _names(expression: Any) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols}


def _bounds(expression: Any) -> set[str]:
    """Return the symbols in the limits of sums and products, which are defined for integers."""
    limits = [limit for series in expression.atoms(Sum, Product) for limit in series.limits]
    return {symbol.name for _, *edges in limits for edge in edges for symbol in edge.free_symbols}


def _random_point(rng: random.Random, place: int) -> Any:
    """Return a value of about 1/4 to 4, with a minus sign at every other point."""
    value = Rational(rng.randrange(1000, 16000), 4001)
    return -value if place % 2 else value


def _equal_at(point: dict[str, Any], left: Any, right: Any) -> bool | None:
    """Return whether two expressions have the same value at a point; None if one has no value there."""
    try:
        values = [_value(side, point) for side in (left, right)]
    except (ArithmeticError, ValueError, TypeError, NotImplementedError):  # sums that diverge, functions that sympy cannot compute
        return None
    if values[0] is None or values[1] is None:
        return None
    return all(_close(one, other) for one, other in zip(values[0], values[1], strict=True))


def _close(first: Any, second: Any) -> bool:
    if first.is_Rational and second.is_Rational:
        return first == second
    tolerance: Any = Rational(_TOLERANCE.numerator, _TOLERANCE.denominator)
    return abs(first - second) <= tolerance * max(1 if not first or not second else 0, abs(first), abs(second))


def _value(expression: Any, point: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return the real and the imaginary part at a point; None if the expression has no number as its value."""
    exact = expression.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part))).subs(
        {symbol: point[symbol.name] for symbol in expression.free_symbols if symbol.name in point}
    )
    number = _summed(exact.doit())
    if number.is_Rational:
        return number, Integer(0)
    number = number.evalf(_DIGITS, maxn=400)
    if number in (nan, zoo, oo, -oo) or not number.is_number or number.is_infinite:
        return None
    parts = number.as_real_imag()
    return parts if all(part.is_Float or part.is_Rational for part in parts) else None


def _summed(expression: Any) -> Any:
    """Replace infinite products, and infinite sums of sines or cosines, by numerical values, for which sympy would need minutes."""
    series = [part for part in expression.atoms(Sum, Product) if len(part.limits) == 1 and part.limits[0][2] == oo]
    limits = {part: _limit(part) for part in series if isinstance(part, Product) or part.function.has(sin, cos)}
    return expression.xreplace({part: value for part, value in limits.items() if value is not None})


def _limit(series: Any) -> Any:
    """Extrapolate an infinite sum or product from its first terms; None if it does not converge, or two precisions do not agree."""
    function: Any = series.function
    (index, start, _), extrapolate = series.limits[0], mpmath.nprod if isinstance(series, Product) else mpmath.nsum

    def term(k: Any) -> Any:
        return mpmath.mpmathify(function.subs(index, Integer(int(k))).evalf(mpmath.mp.dps))

    values = []
    for digits in (_DIGITS, _DIGITS + 10):
        with mpmath.workdps(digits):
            try:
                values.append(extrapolate(term, [int(start), mpmath.inf], method="r+s"))
            except (ArithmeticError, ValueError, TypeError, NoConvergence):  # the terms are not numbers, or do not converge
                return None
    if not all(map(mpmath.isfinite, values)) or abs(values[1] - values[0]) > abs(values[0]) * mpmath.mpf(10) ** -30:
        return None
    return Float(values[0].real, _DIGITS) + I * Float(values[0].imag, _DIGITS)


def _rounded(first: str, left: Any, second: str, right: Any) -> bool:
    """Return whether one expression is a plain decimal to which the other one rounds, such as 1.41421 for the root of 2."""
    for text, other in ((first, right), (second, left)):
        number = read_number(text)
        if number is not None and number.unit_in_last_place is not None:
            value = _value(other, {})
            if value is not None and value[1] == 0 and rounds(number, Fraction(str(value[0]))):
                return True
    return False


def _are_proportional(left: Any, right: Any) -> bool:
    """Return whether one expression is a constant, nonzero multiple of the other, so that both have the same zeros."""
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr) or not left.free_symbols:
        return False
    if _names(left) != _names(right):
        return False
    rng = random.Random(1)
    ratios = []
    for place in range(_POINTS):
        point = {name: _random_point(rng, place) for name in sorted(_names(left))}
        values = _value(left, point), _value(right, point)
        if values[0] is None or values[1] is None or values[0][1] != 0 or values[1][1] != 0 or not values[1][0]:
            return False
        ratios.append(values[0][0] / values[1][0])
    return bool(ratios[0]) and all(_close(ratio, ratios[0]) for ratio in ratios)
