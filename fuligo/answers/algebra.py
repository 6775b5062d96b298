r"""Algebraic equality with sympy; latex2sympy2 (of math-verify) reads the LaTeX.

Two expressions are equal if their values are: both are computed with 40 digits, at random points where they have symbols. Simplification
decides only what has no value (integrals, sums, matrices of symbols), because it takes long and its failures are silent.
"""

from __future__ import annotations

import random
from fractions import Fraction
from functools import lru_cache
from typing import Any

from fuligo.answers.number import read_number, rounds

_DIGITS = 40
_TOLERANCE = Fraction(1, 10**25)
_POINTS = 4


def equal_expressions(first: str, second: str) -> bool:
    """Return whether two expressions are equal. `second` may be an equation `... = 0`; then they must be proportional."""
    proportional = second.endswith("=0")
    left, right = _parsed(first), _parsed(second.removesuffix("=0"))
    if left is None or right is None:
        return _squeezed(first) == _squeezed(second)
    if proportional:
        return _are_proportional(left, right)
    if hasattr(left, "shape") or hasattr(right, "shape"):
        return _equal_matrices(left, right)
    return _equal_values(first, left, second, right)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Return the sympy expression of a text, with every symbol complex and `i` the imaginary unit; None if it cannot be read."""
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from sympy import I, Rational

    number = read_number(text)
    if number is not None:
        return Rational(number.value.numerator, number.value.denominator)
    try:
        parsed: Any = latex2sympy(text, is_real=False, convert_degrees=False, normalization_config=None)
    except (Exception, RecursionError):
        return None
    if not hasattr(parsed, "free_symbols"):
        return None
    return parsed.xreplace({symbol: I for symbol in parsed.free_symbols if symbol.name == "i"})


def _squeezed(text: str) -> str:
    return "".join(text.replace("{", "").replace("}", "").split()).casefold()


def _equal_values(first: str, left: Any, second: str, right: Any) -> bool:
    import sympy

    if left.has(sympy.zoo, sympy.nan) or right.has(sympy.zoo, sympy.nan):
        return False
    if left == right:
        return True
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return False
    if sympy.oo in (left, right) or -sympy.oo in (left, right):
        return left.doit() == right.doit()
    symbols = sorted(_names(left) | _names(right))
    rng = random.Random(0)
    verdicts = [_equal_at({name: _random_point(rng, place) for name in symbols}, left, right) for place in range(_POINTS if symbols else 1)]
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return _simplifies_to_zero(left - right)
    if all(known):
        return True
    return not symbols and _rounded(first, left, second, right)


def _names(expression: Any) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols}


def _random_point(rng: random.Random, place: int) -> Any:
    """Return a value between 1/4 and 4, negative at every other point."""
    from sympy import Rational

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
    from sympy import Rational

    return abs(first - second) <= Rational(_TOLERANCE.numerator, _TOLERANCE.denominator) * max(
        1 if not first or not second else 0, abs(first), abs(second)
    )


def _value(expression: Any, point: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return the real and the imaginary part at a point; None if the expression has no number as its value."""
    from sympy import nan, oo, zoo

    exact = _exact(expression).subs({symbol: point[symbol.name] for symbol in expression.free_symbols if symbol.name in point})
    number = exact.doit().evalf(_DIGITS, maxn=400)
    if number in (nan, zoo, oo, -oo) or not number.is_number or number.is_infinite:
        return None
    parts = number.as_real_imag()
    return parts if all(part.is_Float or part.is_Rational for part in parts) else None


def _exact(expression: Any) -> Any:
    """Replace decimals by the fractions that they write."""
    from sympy import Float, Rational

    return expression.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))


def _rounded(first: str, left: Any, second: str, right: Any) -> bool:
    """Return whether one of the two is a plain decimal that rounds the other, as 1.41421 for the root of 2."""
    for text, other in ((first, right), (second, left)):
        number = read_number(text)
        if number is not None and number.unit_in_last_place is not None:
            value = _value(other, {})
            if value is not None and value[1] == 0 and rounds(number, Fraction(str(value[0]))):
                return True
    return False


def _simplifies_to_zero(difference: Any) -> bool:
    from sympy import simplify

    try:
        return simplify(difference) == 0
    except (ArithmeticError, ValueError, TypeError, NotImplementedError):
        return False


def _equal_matrices(left: Any, right: Any) -> bool:
    if getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    return all(_equal_values(str(one), one, str(other), other) for one, other in zip(left.doit(), right.doit(), strict=True))


def _are_proportional(left: Any, right: Any) -> bool:
    """Return whether two expressions have the same zeros because one is a multiple of the other."""
    import sympy

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
