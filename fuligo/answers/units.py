r"""Quantities: numbers with a unit or a counted thing, `5 km/h`, `7\text{ kg}`, `18 eggs`, `25\%`."""

import re
from dataclasses import dataclass

from fuligo.answers.number import read_number

_NAMES = {
    "km": "kilometer kilometre",
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "mile": "mi",
    "ft": "foot feet",
    "in": "inch inches",
    "yd": "yard",
    "kg": "kilogram kgs",
    "g": "gram gm gms",
    "mg": "milligram",
    "lb": "pound lbs",
    "oz": "ounce",
    "l": "liter litre L",
    "ml": "milliliter millilitre mL",
    "s": "second sec secs",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "d",
    "week": "wk",
    "month": "mo",
    "year": "yr yrs",
    "degree": "deg degrees",
    "radian": "rad radians",
    "km/h": "kmph kmh kph",
    "mile/h": "mph",
    "m/s": "mps",
    "hz": "hertz",
    "n": "newton N",
    "j": "joule J",
    "w": "watt W",
    "v": "volt V",
    "dollar": "usd",
    "cent": "",
    "euro": "€ eur",
    "£": "gbp",
}
KNOWN = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
"""Canonical name of a unit, by each of its names."""
_SINGLE = frozenset("mgshlLdNJWV")
"""Units of one letter, which need a space before them: `7m` is a product."""
_NUMBER_PART = (
    r"(?P<number>[+-]? ?(?:\d[\d,. ]*\d|\d|\.\d+)(?:[eE][+-]?\d+)?(?: ?(?:\\times|\\cdot) ?10 ?\^ ?(?:\{[+-]?\d+\}|\d))?(?:\.(?!\d))?"
    r"(?: ?\\frac ?\{\d+\} ?\{\d+\}| \d+ ?/ ?\d+|/\d+)?(?: ?(?:thousand|million|billion|trillion))?"
    r"|[+-]? ?\\frac ?\{ ?\d+ ?\} ?\{ ?\d+ ?\})"
)
_PLAIN_UNIT = r"(?P<gap> ?)(?P<plain>[a-zA-Z€£][a-zA-Z ]*(?:\^ ?\{?\d\}?)?(?: ?/ ?[a-zA-Z]+(?:\^ ?\{?\d\}?)?)?)"
_QUANTITY = re.compile(_NUMBER_PART + rf"(?P<percent>%)?(?:{_PLAIN_UNIT})?", re.ASCII)
_TEXT_UNIT = re.compile(
    r"(?P<body>.*[^\s\\]) ?\\text ?\{ ?(?P<unit>[^{}\d]*)\}(?P<power> ?\^ ?\{?\d\}?)?(?P<per> ?/ ?\\text ?\{[^{}]*\}(?:\^ ?\{?\d\}?)?)?"
)
_CURRENCIES = frozenset("€£")
_DROPPED = frozenset(("unit", "units", "square unit", "square units", "cubic unit", "cubic units", "sq unit", "sq units"))


@dataclass(slots=True, frozen=True)
class Value:
    """Number, expression or matrix."""

    text: str
    """Normalized text without unit."""
    unit: str = ""
    """Canonical name of the unit; empty if the answer has none."""
    percent: bool = False


def split_unit(text: str) -> Value | None:
    r"""Split a number, with or without a unit, or an expression before `\text{unit}` or `%`; return None for any other text."""
    if text[:1] in _CURRENCIES and read_number(text[1:].strip()) is not None:
        return Value(text[1:].strip(), KNOWN.get(text[0], text[0]))
    if read_number(text) is not None:
        return Value(text)
    if text.endswith("%"):
        return Value(text[:-1].strip(), percent=True)
    if match := _TEXT_UNIT.fullmatch(text):
        unit = match["unit"] + (match["power"] or "") + re.sub(r"\\text ?\{([^{}]*)\}", r"\1", match["per"] or "")
        body = match["body"].strip()
        several = read_number(body) is None and re.search(r"\\text|[,;=<>]|\\(?:le|ge|cup|in)(?![a-zA-Z])", body)
        if several or unit.strip() in ("and", "or"):
            return None
        return Value(body, canonical_unit(unit))
    match = _QUANTITY.fullmatch(text)
    if match is None or match["plain"] is None:
        return None
    number, unit = match["number"].strip().rstrip("."), match["plain"].strip()
    if read_number(number) is None or not _is_unit(unit, spaced=bool(match["gap"])):
        return None
    return Value(number, canonical_unit(unit), percent=match["percent"] is not None)


def _is_unit(text: str, *, spaced: bool) -> bool:
    """Return whether letters after a number are a unit and not symbols that it multiplies."""
    words = re.findall("[a-zA-Z€£]+", text)
    if any(word in ("or", "and", "to", "x", "pi") for word in words):
        return False
    if words[0] in _SINGLE:
        return spaced or "/" in text
    known = words[0].casefold() in KNOWN or words[0] in ("sq", "cu")
    return (known and len(words[0]) > 1) or (spaced and len(words[0]) >= 3) or words[0] in _CURRENCIES


def canonical_unit(text: str) -> str:
    """Return the canonical name of a unit; for a counted thing, its last word in the singular."""
    text = re.sub(r"[\s{}]+", " ", text).strip().replace(" ^ ", "^").replace(" ^", "^").replace("^ ", "^")
    if text.casefold() in _DROPPED or re.fullmatch(r"units?\^\d", text.casefold()):
        return ""
    text = re.sub(r" ?(?:/|\bper\b) ?", "/", text)
    return "/".join(_one_unit(part.strip()) for part in text.split("/"))


def _one_unit(text: str) -> str:
    for pattern, power in ((r"(?:square|sq\.?|squared) (.*)", "^2"), (r"(?:cubic|cu\.?) (.*)", "^3")):
        if match := re.fullmatch(pattern, text):
            return _one_unit(match[1]) + power
    base, caret, power = text.partition("^")
    if base in KNOWN:
        return KNOWN[base] + caret + power
    word = base.casefold().split(" ")[-1].strip(".") if base.strip() else ""
    singular = word[:-1] if word.endswith("s") and not word.endswith("ss") else word
    return (KNOWN.get(word) or KNOWN.get(singular, singular)) + caret + power


def units_agree(first: str, second: str) -> bool:
    """Return whether two units agree; a missing unit agrees with any."""
    return not first or not second or first == second
