r"""Structure of an answer (a value, list, tuple, set, interval or equation), parsed before any algebra.

Algebra would lose the meaning of brackets and commas: `(1, 2)` is not equal to `2, 1`, nor `2, 2` to `2`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from fuligo.answers.spelling import normalize
from fuligo.answers.units import Value, split_unit

_OPENING, _CLOSING = "([{", ")]}"
_WORD_SEPARATOR = re.compile(r"\\text\{ ?,? ?(?:and|or) ?\}|(?<![\\a-zA-Z]),? ?(?:and|or)(?![a-zA-Z])", re.IGNORECASE)
_APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])")
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z]) ?")
_MAX_DEPTH = 30
_RELATION = re.compile(r"\\(?:le|ge|ne|approx|in)(?![a-zA-Z])|[=<>]")
_SYMBOL = re.compile(
    r"\\?[a-zA-Z]+(?:_ ?(?:\{[^{}]*\}|\w))?'*(?: ?\([^()]*\))?|\\text\{[^{}]*\}(?:_ ?(?:\{[^{}]*\}|\w))?|[a-zA-Z][a-zA-Z ]*[a-zA-Z]"
)
_SYMBOLS = re.compile(
    r"(?:\\(?:frac|overline|angle|triangle|vec|overrightarrow|cdot|mid|lvert|rvert)(?![a-zA-Z])|[a-zA-Z]|_ ?(?:\{\w+\}|\w)|[{}:|/' ])+"
)
_WORD = re.compile(r"\(?(?:\\text ?\{(?P<text>[^{}]*)\}|(?P<plain>[a-zA-Z][a-zA-Z .'-]*))\)?")
_FUNCTIONS = frozenset(("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "sqrt", "arcsin", "arccos", "arctan"))
_SHORT_WORDS = frozenset(("yes", "no", "odd", "all"))
_CONSTANT = re.compile(r"(?:[\d\s.,+\-*/^{}()]|\\(?:frac|sqrt|pi|infty|cdot|times|e)(?![a-zA-Z])|(?<![a-zA-Z])e(?![a-zA-Z]))+")


class Kind(Enum):
    """Kinds of collections. Collections of different kinds may be unequal even if their contents are equal."""

    LIST = "several answers in any order"
    SET = "a set"
    TUPLE = "a tuple, point or interval"


@dataclass(slots=True, frozen=True)
class Word:
    r"""Name or word, compared as text: `east`, `ABC`, `\text{no solution}`."""

    text: str


@dataclass(slots=True, frozen=True)
class Collection:
    """Several answers."""

    kind: Kind
    items: tuple[Answer, ...]
    brackets: str = ""
    """Opening and closing bracket of a tuple; `:` for a ratio."""
    variable: str = ""
    """Variable whose inequality the interval solves; empty if none is named."""


@dataclass(slots=True, frozen=True)
class Equation:
    """Chain of expressions with relations between them."""

    sides: tuple[str, ...]
    relations: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Assignment:
    """Name and its value, in every form that the answer gives: `x = 2 + 3 = 5`."""

    left: str
    """Normalized name."""
    values: tuple[Answer, ...]

    @property
    def name(self) -> str:
        """Name in lower case, without markup and spaces."""
        match = _WORD.fullmatch(self.left)
        return (match["text"] or match["plain"] if match else self.left).replace(" ", "").casefold()


@dataclass(slots=True, frozen=True)
class Approximation:
    r"""Exact value, and the decimal that the answer gives with it: `\sqrt{2} \approx 1.41`."""

    exact: Answer
    decimal: Answer


Answer = Value | Word | Collection | Equation | Assignment | Approximation


def read(text: str) -> Answer:
    """Parse the structure of an answer. A text with brackets nested too deeply becomes a `Value`."""
    text = normalize(text)
    return _read(text) if _depth(text) <= _MAX_DEPTH else Value(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _read(text: str) -> Answer:
    text = _without_braces(text)
    if (quantity := split_unit(text)) is not None:
        return quantity
    if (items := _items(text)) is not None:
        return Collection(Kind.LIST, tuple(_read(item) for item in items))
    if len(parts := _split(text, _UNION)) > 1:
        return Collection(Kind.LIST, tuple(_read(part) for part in parts))
    if len(_PLUS_MINUS.findall(text)) == 1:
        return Collection(Kind.LIST, tuple(_read(_PLUS_MINUS.sub(sign, text).removeprefix("+").strip()) for sign in "+-"))
    if (chain := _chain(text)) is not None:
        return chain
    if (collection := _bracketed(text)) is not None:
        return collection
    if (word := _word(text)) is not None:
        return word
    if len(parts := _split(text, _COLON)) > 1 and all(parts):
        return Collection(Kind.TUPLE, tuple(_read(part) for part in parts), ":")
    return Value(text)


def _without_braces(text: str) -> str:
    """Remove braces around the whole text."""
    while text.startswith("{") and text.endswith("}") and _matching(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _matching(text: str, start: int) -> int | None:
    """Return the position of the bracket that closes the one at `start`; None if none does.

    Brackets of any kind close each other: `(1, 2]`.
    """
    depth = 0
    for position in range(start, len(text)):
        if text[position] in _OPENING:
            depth += 1
        elif text[position] in _CLOSING:
            depth -= 1
            if depth == 0:
                return position
    return None


def _split(text: str, separator: re.Pattern[str], found: list[str] | None = None) -> list[str]:
    """Split a text at the separators outside of all brackets, and append the separators to `found`."""
    parts, start, depth, position = [], 0, 0, 0
    while position < len(text):
        depth += (text[position] in _OPENING) - (text[position] in _CLOSING)
        if depth == 0 and (match := separator.match(text, position)):
            parts.append(text[start:position].strip())
            if found is not None:
                found.append(match[0])
            start = position = match.end()
        elif text.startswith(("\\text{", "\\begin{"), position) and (end := _matching(text, text.index("{", position))) is not None:
            position = _end_of_environment(text, position, end)
        else:
            position += 1
    return [*parts, text[start:].strip()]


def _end_of_environment(text: str, start: int, end: int) -> int:
    r"""Return the end position of a `\text{...}` or an environment that begins at `start`."""
    if not text.startswith("\\begin", start):
        return end + 1
    close = "\\end" + text[text.index("{", start) : end + 1]
    found = text.find(close, end)
    return len(text) if found < 0 else found + len(close)


_COMMA, _SEMICOLON, _COMMA_OR_SEMICOLON, _COLON = (re.compile(f"[{separators}]") for separators in (",", ";", ",;", ":"))
_SEPARATOR = re.compile(rf"[,;]|{_WORD_SEPARATOR.pattern}", re.IGNORECASE)


def _items(text: str) -> list[str] | None:
    """Return the entries of a list without brackets around it; None if the text is not a list."""
    by_semicolon = [item for item in _split(text, _SEMICOLON) if item]
    if len(by_semicolon) > 1 and all(len(_split(item, _COMMA)) > 1 for item in by_semicolon):
        return by_semicolon  # systems: x = 1, y = 2; x = 3, y = 4
    items = [item for item in _split(text, _SEPARATOR) if item]
    return items if len(items) > 1 else None


def _bracketed(text: str) -> Answer | None:
    """Return a set, tuple or interval, or the only entry of round brackets; None for any other text."""
    if text.startswith("\\{") and text.endswith("\\}") and _matching(text, 1) == len(text) - 1:
        inner = text[2:-2].strip()
        entries = [entry for entry in _split(inner, _COMMA_OR_SEMICOLON) if entry]
        return Collection(Kind.SET, tuple(_read(entry) for entry in entries))
    if len(text) < 3 or text[0] not in "([]" or text[-1] not in ")][":
        return None
    opening, closing = ("(" if text[0] == "]" else text[0]), (")" if text[-1] == "[" else text[-1])
    if text[0] != "]" and text[-1] != "[" and _matching(text, 0) != len(text) - 1:
        return None
    entries = _split(text[1:-1].strip(), _COMMA_OR_SEMICOLON)
    if len(entries) > 1 and all(entries):
        return Collection(Kind.TUPLE, tuple(_read(entry) for entry in entries), opening + closing)
    return _read(entries[0]) if opening + closing == "()" and entries[0] else None


def _chain(text: str) -> Answer | None:
    """Return an equation, an assignment or the interval of an inequality; None if the text has no relation."""
    sides = _split(text, _RELATION, found := [])
    if len(sides) < 2:
        return None
    if not all(sides):
        return Value(text)
    relations = tuple(found)
    if relations[0] == "\\in" and len(sides) == 2:
        return _read(sides[1])
    if relations.count("\\approx") == 1 and set(relations) <= {"=", "\\approx"}:
        exact, decimal = _split(text, _APPROXIMATELY)
        return Assignment(exact, (_read(decimal),)) if is_name(exact) else Approximation(_read(exact), _read(decimal))
    if set(relations) == {"="}:
        if is_name(sides[0]):
            return Assignment(sides[0], tuple(_read(side) for side in sides[1:]))
        if len(sides) == 2 and is_name(sides[1]) and _CONSTANT.fullmatch(sides[0]):
            return Assignment(sides[1], (_read(sides[0]),))
        return Equation(tuple(sides), ("=",) * (len(sides) - 1))
    return _interval(sides, relations) or Equation(tuple(sides), relations)


def is_name(text: str) -> bool:
    """Return whether a text names a quantity: a symbol, a product or quotient of symbols, a function, words, or a tuple of symbols."""
    if text.startswith("(") and _matching(text, 0) == len(text) - 1:
        return all(is_name(entry) for entry in _split(text[1:-1], _COMMA))
    named = _SYMBOL.fullmatch(text) or (_SYMBOLS.fullmatch(text) and re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", text))
    return bool(named) and text.strip("\\") not in _FUNCTIONS and text not in ("\\pi", "\\infty", "e", "i")


_UPWARD = {"<": True, "\\le": True, ">": False, "\\ge": False}


def _interval(sides: list[str], relations: tuple[str, ...]) -> Collection | None:
    """Return the interval that solves an inequality of one symbol with constants; None if it is of another form."""
    symbols = [position for position, side in enumerate(sides) if is_name(side)]
    constants = [side for position, side in enumerate(sides) if position not in symbols]
    if len(symbols) != 1 or len(sides) > 3 or not all(_CONSTANT.fullmatch(side) for side in constants):
        return None
    if any(relation not in _UPWARD for relation in relations) or len({_UPWARD[relation] for relation in relations}) > 1:
        return None
    if not _UPWARD[relations[0]]:
        sides, relations, symbols = sides[::-1], relations[::-1], [len(sides) - 1 - symbols[0]]
    position = symbols[0]
    closed = [relation in ("\\le", "\\ge") for relation in relations]
    if len(sides) == 3 and position != 1:
        return None
    low, low_closed = (sides[position - 1], closed[position - 1]) if position > 0 else ("-\\infty", False)
    high, high_closed = (sides[position + 1], closed[position]) if position + 1 < len(sides) else ("\\infty", False)
    brackets = ("[" if low_closed else "(") + ("]" if high_closed else ")")
    return Collection(Kind.TUPLE, (_read(low), _read(high)), brackets, Assignment(sides[position], ()).name)


def _word(text: str) -> Word | None:
    """Return a word or name; None if the letters are a product of symbols."""
    match = _WORD.fullmatch(text)
    if match is None:
        return None
    if match["text"] is not None:
        inner = match["text"].strip()
        return Word(_spoken(inner.strip("()"))) if not any(character.isdigit() for character in inner) else None
    letters = match["plain"]
    longest = max(len(run) for run in re.findall("[a-zA-Z]+", letters))
    spelled = longest >= 4 or " " in letters.strip() or (longest >= 2 and letters.isupper()) or letters.casefold() in _SHORT_WORDS
    if not spelled or letters.split(" ")[0] in _FUNCTIONS:
        return None
    return Word(letters if letters.isupper() else _spoken(letters))


def _spoken(text: str) -> str:
    return text if text.isupper() else " ".join(re.findall(r"[^\s.,;:!?]+", text)).casefold()
