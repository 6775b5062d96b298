r"""Plain numbers, as fractions: `1,234`, `-2.50`, `5e3`, `6.6\times10^{-34}`, `\frac{1}{3}`, `2 1/2`, `0.\overline{3}`, `3 million`."""

import re
from dataclasses import dataclass
from fractions import Fraction

_MAX_DIGITS = 100
_MAX_EXPONENT = 400
MIN_DIGITS = 6
"""Significant digits from which a decimal is accepted for a number that rounds to it, such as 0.333333 for 1/3."""
_FLOAT_DIGITS = 15
_FLOAT_NOISE = Fraction(1, 10**12)
"""Relative error accepted as floating-point rounding in a number of at least 15 digits, such as 0.30000000000000004 for 0.3."""
_MAX_NOISE = Fraction(1, 10**6)

_DECIMAL = r"(?:(?P<grouped>\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)|(?P<digits>\d*))(?:\.(?P<places>\d*)(?:\\overline\{(?P<period>\d+)\})?)?"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?{_DECIMAL}"
    r"(?: ?(?:[eE](?P<exponent>[+-]?\d+)|(?:\\times|\\cdot) ?10 ?\^ ?(?:\{ ?(?P<braced>[+-]?\d+) ?\}|(?P<single>\d))))?"
    r"(?: ?(?P<scale>thousand|million|billion|trillion))?",
    re.ASCII,
)
_FRACTION = re.compile(
    r"(?P<sign>[+-]?) ?(?:(?P<whole>\d+) ?(?:(?<=\d) (?=\d)|(?=\\)))?"
    r"(?:\\frac ?\{ ?(?P<above>-?\d+) ?\} ?\{ ?(?P<below>\d+) ?\}|(?P<top>\d+) ?/ ?(?P<bottom>\d+))",
    re.ASCII,
)
_POWER_OF_TEN = re.compile(r"(?P<sign>[+-]?) ?10 ?\^ ?(?:\{ ?(?P<braced>[+-]?\d+) ?\}|(?P<single>\d))", re.ASCII)
_SCALES = {None: 1, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


@dataclass(slots=True, frozen=True)
class Number:
    """Number, and the precision with which it is written."""

    value: Fraction
    unit_in_last_place: Fraction | None = None
    """Value of the last decimal place; None: an integer or fraction, which is exact."""
    num_digits: int = 0
    """Significant digits of a decimal."""


def read_number(text: str) -> Number | None:
    """Parse a normalized text as a number; return None if it is not one."""
    if len(text) > _MAX_DIGITS or not any(character.isdigit() for character in text):
        return None
    if match := _NUMBER.fullmatch(text):
        return _decimal(match)
    if match := _FRACTION.fullmatch(text):
        above, below = int(match["above"] or match["top"]), int(match["below"] or match["bottom"])
        if below == 0 or (match["whole"] and above < 0):
            return None
        return Number(_signed(match, int(match["whole"] or 0) + Fraction(above, below)))
    if match := _POWER_OF_TEN.fullmatch(text):
        exponent = int(match["braced"] or match["single"])
        return Number(_signed(match, Fraction(10) ** exponent)) if abs(exponent) <= _MAX_EXPONENT else None
    return None


def _decimal(match: re.Match[str]) -> Number | None:
    digits = re.sub("[ ,]", "", match["grouped"] or match["digits"] or "")
    places = match["places"] or ""
    period = match["period"]
    exponent = int(match["exponent"] or match["braced"] or match["single"] or 0)
    if not digits + places + (period or "") or abs(exponent) > _MAX_EXPONENT:
        return None
    value = Fraction(int(digits + places or "0"), 10 ** len(places))
    if period:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(places))
    factor = Fraction(10) ** exponent * _SCALES[match["scale"]]
    if not places or period:
        return Number(_signed(match, value * factor))
    return Number(_signed(match, value * factor), factor / 10 ** len(places), len((digits + places).lstrip("0")))


def _signed(match: re.Match[str], value: Fraction) -> Fraction:
    return -value if match["sign"] == "-" else value


def equal_numbers(first: Number, second: Number) -> bool:
    """Return whether two numbers are equal, or one is the other rounded to at least 6 significant digits.

    A number of at least 15 digits may also differ by a rounding error of floating-point arithmetic: 0.30000000000000004 is 0.3. Integers
    and fractions are not rounded: 1000001 is not 1000000. Zero equals only zero.
    """
    if first.value == second.value:
        return True
    difference = abs(first.value - second.value)
    noise = min(_FLOAT_NOISE * max(abs(first.value), abs(second.value)), _MAX_NOISE)
    if max(first.num_digits, second.num_digits) >= _FLOAT_DIGITS and difference <= noise:
        return True
    decimals = [number for number in (first, second) if number.unit_in_last_place is not None]
    if not decimals:
        return False
    coarse = max(decimals, key=lambda number: number.unit_in_last_place or 0)
    return rounds(coarse, second.value if coarse is first else first.value)


def rounds(decimal: Number, value: Fraction) -> bool:
    """Return whether a decimal has at least `MIN_DIGITS` significant digits and is the value rounded to its last place."""
    if decimal.unit_in_last_place is None or decimal.num_digits < MIN_DIGITS:
        return False
    return abs(decimal.value - value) * 2 <= decimal.unit_in_last_place


_BASED = re.compile(r"\(?(?P<digits>[0-9A-Z]+)\)?_ ?(?:\{?\(?(?P<base>\d{1,2})\)?\}?|\{?\\text\{ ?(?P<word>\w+) ?\}\}?)", re.ASCII)
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def read_based(text: str) -> tuple[int, int] | None:
    """Return (value, base) of a number with its base as a subscript, such as `101_2`; None for any other text."""
    match = _BASED.fullmatch(text)
    if match is None or not any(character.isdigit() for character in match["digits"]):
        return None
    word = (match["word"] or "").lower()
    base = int(match["base"]) if match["base"] else _BASES.index(word) + 2 if word in _BASES else 0
    try:
        return (int(match["digits"], base), base) if 2 <= base <= 36 else None
    except ValueError:
        return None
