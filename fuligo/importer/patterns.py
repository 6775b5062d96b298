"""File-name patterns of bash (`a*[0-9]`) and simple patterns of grep, matched in linear time per start: no pattern of a hostile script
can make the matcher backtrack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

_CLASSES = {
    "digit": "0123456789",
    "alpha": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "space": " \t\n\r",
}


class Times(Enum):
    """How often an element stands."""

    ONCE = "once"
    OPTIONAL = "optional"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Element:
    """One character of a set, or a run of them."""

    characters: frozenset[str] | None
    """None: every character."""
    negated: bool = False
    times: Times = Times.ONCE

    def takes(self, character: str) -> bool:
        return self.characters is None or (character in self.characters) != self.negated


Pattern = tuple[Element, ...]


class PatternError(ValueError):
    """A pattern that is not supported."""


def glob_pattern(parts: Iterable[tuple[str, bool]]) -> Pattern:
    """A bash pattern of (text, is quoted) parts: `*`, `?` and `[...]` are special where they are not quoted."""
    elements: list[Element] = []
    for text, quoted in parts:
        position = 0
        while position < len(text):
            character = text[position]
            position += 1
            if quoted or character not in "*?[":
                elements.append(Element(frozenset(character)))
            elif character == "[" and "]" in text[position + 1 :]:
                element, position = _bracket(text, position)
                elements.append(element)
            elif character == "[":
                elements.append(Element(frozenset("[")))
            else:
                elements.append(Element(None, times=Times.ANY if character == "*" else Times.ONCE))
    return tuple(elements)


def grep_pattern(text: str, extended: bool, fixed: bool, ignore_case: bool) -> Pattern:
    """A pattern of grep without groups, alternatives, anchors and counts.

    Raises:
        PatternError: it has such.
    """
    elements: list[Element] = []
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if fixed:
            elements.append(Element(frozenset(character)))
        elif character == "\\" and position < len(text) and text[position] in ".*[]^$\\/-":
            elements.append(Element(frozenset(text[position])))
            position += 1
        elif character in "\\^$" or (extended and character in "(){}|"):
            raise PatternError(f"only letters, sets such as [0-9], `.`, `*` and, with -E, `+` and `?` are understood in {text!r}")
        elif character == "*" and elements:
            elements[-1] = replace(elements[-1], times=Times.ANY)
        elif extended and character == "+" and elements:
            elements.append(replace(elements[-1], times=Times.ANY))
        elif extended and character == "?" and elements:
            elements[-1] = replace(elements[-1], times=Times.OPTIONAL)
        elif character == "[" and "]" in text[position + 1 :]:
            element, position = _bracket(text, position)
            elements.append(element)
        else:
            elements.append(Element(None if character == "." else frozenset(character)))
    return tuple(_both_cases(element) for element in elements) if ignore_case else tuple(elements)


def ends(pattern: Pattern, text: str, start: int = 0) -> list[int]:
    """All positions where a match that begins at `start` can end, ascending."""
    found: list[int] = []
    states = _closure(pattern, {0})
    for position in range(start, len(text) + 1):
        if len(pattern) in states:
            found.append(position)
        if position == len(text) or not states:
            break
        step = {
            state if pattern[state].times is Times.ANY else state + 1
            for state in states
            if state < len(pattern) and pattern[state].takes(text[position])
        }
        states = _closure(pattern, step)
    return found


def matches(pattern: Pattern, text: str) -> bool:
    """The whole text is a match."""
    return bool(found := ends(pattern, text)) and found[-1] == len(text)


def search(pattern: Pattern, text: str) -> Iterator[tuple[int, int]]:
    """The matches from left to right, the longest at each place, none empty."""
    position = 0
    while position < len(text):
        found = ends(pattern, text, position)
        if found and found[-1] > position:
            yield position, found[-1]
            position = found[-1]
        else:
            position += 1


def _closure(pattern: Pattern, states: set[int]) -> set[int]:
    for state in list(states):
        following = state
        while following < len(pattern) and pattern[following].times is not Times.ONCE:
            following += 1
            states.add(following)
    return states


def _bracket(text: str, position: int) -> tuple[Element, int]:
    """The set whose `[` stands before `position`, and the position after its `]`."""
    negated = text[position] in "!^"
    position += negated
    characters: set[str] = set()
    first = True
    while first or text[position] != "]":
        first = False
        if text.startswith("[:", position) and (end := text.find(":]", position)) > 0:
            name = text[position + 2 : end]
            if name not in _CLASSES:
                raise PatternError(f"the class [:{name}:] is not understood")
            characters.update(_CLASSES[name])
            position = end + 2
        elif text[position + 1 : position + 2] == "-" and text[position + 2 : position + 3] not in ("", "]"):
            low, high = ord(text[position]), ord(text[position + 2])
            if high - low > 255:
                raise PatternError(f"the range {text[position : position + 3]} is too long")
            characters.update(map(chr, range(low, high + 1)))
            position += 3
        else:
            characters.add(text[position])
            position += 1
        if position >= len(text):
            raise PatternError(f"the set in {text!r} does not end")
    return Element(frozenset(characters), negated), position + 1


def _both_cases(element: Element) -> Element:
    if element.characters is None:
        return element
    return replace(element, characters=frozenset(case for c in element.characters for case in (c.lower(), c.upper())))
