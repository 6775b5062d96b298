"""Equality of two answers: their structures must agree, and their values by number or by algebra."""

import re
from collections.abc import Callable, Sequence

from fuligo.answers.number import Number, equal_numbers, read_based, read_number
from fuligo.answers.reading import Answer, Approximation, Assignment, Collection, Equation, Kind, Word, read
from fuligo.answers.spelling import normalize
from fuligo.answers.units import Value, units_agree

MAX_CHARS = 2000
"""Limit of an answer's length, in characters; longer answers are compared only as plain numbers or as identical text."""

Algebra = Callable[[str, str], bool]
"""Function that decides whether two normalized expressions are equal."""


class NeedsAlgebraError(Exception):
    """Raised if a comparison of two expressions needs algebra, but the caller passed no function for it."""


def no_algebra(first: str, second: str) -> bool:
    """Raise NeedsAlgebraError instead of comparing two expressions."""
    raise NeedsAlgebraError


def equal_answers(answer: str, gold: str, algebra: Algebra = no_algebra) -> bool:
    """Return whether an answer equals the gold answer. Raises NeedsAlgebraError if that needs algebra and `algebra` is not given."""
    answer, gold = answer.strip(), gold.strip()
    if not answer or not gold:
        return False
    if answer == gold:
        return True
    numbers = read_number(answer.strip("$")), read_number(gold.strip("$"))
    if numbers[0] is not None and numbers[1] is not None:
        return equal_numbers(numbers[0], numbers[1])
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    if (first := normalize(answer)) == (second := normalize(gold)) or _squeezed(first) == _squeezed(second) != "":
        return True
    return _Comparison(algebra).equal(read(answer), read(gold))


def _squeezed(text: str) -> str:
    """Remove all spaces except those between two letters or digits."""
    return re.sub(r" (?![\da-zA-Z])|(?<![\da-zA-Z]) ", "", text)


class _Comparison:
    """Comparison of two parsed answers."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra

    def equal(self, answer: Answer, gold: Answer) -> bool:
        """Return whether two structures are equal."""
        if isinstance(answer, Approximation) and isinstance(gold, Approximation):
            return self.equal(answer.exact, gold.exact)
        if isinstance(answer, Approximation):
            return self.equal(answer.exact, gold) or self.equal(answer.decimal, gold)
        if isinstance(gold, Approximation):
            return self.equal(answer, gold.exact) or self.equal(answer, gold.decimal)
        if isinstance(answer, Equation) or isinstance(gold, Equation):
            return self._equal_equations(answer, gold)
        if isinstance(answer, Assignment) or isinstance(gold, Assignment):
            return self._equal_assignments(answer, gold)
        if isinstance(answer, Collection) and isinstance(gold, Collection):
            return self._equal_collections(answer, gold)
        if isinstance(answer, Collection) or isinstance(gold, Collection):
            return self._equal_singleton(answer, gold)
        if isinstance(answer, Word) or isinstance(gold, Word):
            return _letters(answer).casefold() == _letters(gold).casefold() != ""
        return self._equal_values(answer, gold)

    def _equal_values(self, answer: Value, gold: Value) -> bool:
        if not units_agree(answer.unit, gold.unit) or (answer.percent and gold.unit) or (gold.percent and answer.unit):
            return False
        if self._equal_texts(answer.text, gold.text):
            return True
        if answer.percent == gold.percent:
            return False
        percent, share = (answer, gold) if answer.percent else (gold, answer)
        number, plain = read_number(percent.text), read_number(share.text)
        if number is None:
            return False
        if plain is None:
            return self._equal_texts(f"\\frac{{{percent.text}}}{{100}}", share.text)
        unit = number.unit_in_last_place
        return equal_numbers(Number(number.value / 100, unit and unit / 100, number.num_digits), plain)

    def _equal_texts(self, answer: str, gold: str) -> bool:
        """Compare two expressions without units."""
        if answer == gold:
            return bool(answer)
        first, second = read_number(answer), read_number(gold)
        if first is not None and second is not None:
            return equal_numbers(first, second)
        first_based, second_based = read_based(answer), read_based(gold)
        if first_based or second_based:
            # Only base 10 may be omitted.
            bases = [(int(n.value), 10) if n is not None and n.value.denominator == 1 else None for n in (first, second)]
            return (first_based or bases[0]) == (second_based or bases[1])
        if not answer or not gold or _is_prose(answer) or _is_prose(gold):
            return False
        return self._algebra(answer, gold)

    def _equal_assignments(self, answer: Answer, gold: Answer) -> bool:
        if len({side.name for side in (answer, gold) if isinstance(side, Assignment)}) > 1:
            return self._equal_equations(answer, gold)
        first, second = (side.values if isinstance(side, Assignment) else (side,) for side in (answer, gold))
        return self._equal_chains(first, second)

    def _equal_chains(self, answer: Sequence[Answer], gold: Sequence[Answer]) -> bool:
        """Compare values given in several forms, such as `2 + 3 = 5`: every form of the answer must equal the gold's last form."""
        return all(self.equal(form, gold[-1]) for form in reversed(answer))

    def _equal_equations(self, answer: Answer, gold: Answer) -> bool:
        if isinstance(answer, Equation) and not isinstance(gold, Equation | Assignment):
            return self._value_of(answer, gold)
        first, second = _sides(answer), _sides(gold)
        if first is None or second is None or len(first.sides) != len(second.sides):
            return False
        if first.relations == ("=",) == second.relations:
            return self._equal_sides(first.sides, second.sides) or self._algebra(_difference(first.sides), _difference(second.sides) + "=0")
        flipped = Equation(first.sides[::-1], tuple(_FLIPPED.get(relation, relation) for relation in reversed(first.relations)))
        return any(side.relations == second.relations and self._equal_sides(side.sides, second.sides) for side in (first, flipped))

    def _equal_sides(self, first: Sequence[str], second: Sequence[str]) -> bool:
        return all(self.equal(read(one), read(other)) for one, other in zip(first, second, strict=True))

    def _value_of(self, answer: Equation, gold: Answer) -> bool:
        """Return whether the last side of an equation equals the gold. Other sides without symbols must equal it too: `5 = 6` is not 6."""
        if set(answer.relations) != {"="}:
            return False
        *others, last = (read(side) for side in answer.sides)
        constant = [
            side for side, text in zip(others, answer.sides, strict=False) if not re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text))
        ]
        return self.equal(last, gold) and all(self.equal(side, last) for side in constant)

    def _equal_collections(self, answer: Collection, gold: Collection) -> bool:
        if answer.kind is gold.kind is Kind.TUPLE:
            same = answer.brackets == gold.brackets and (not answer.variable or not gold.variable or answer.variable == gold.variable)
            return same and self._equal_in_order(answer.items, gold.items)
        if Kind.TUPLE in (answer.kind, gold.kind):
            in_a_tuple, listed = (answer, gold) if answer.kind is Kind.TUPLE else (gold, answer)
            if listed.kind is Kind.SET or in_a_tuple.brackets != "()" or in_a_tuple.variable:
                return False
            return self._equal_in_order(answer.items, gold.items)
        if _is_system(answer) != _is_system(gold):
            return self._equal_in_order(answer.items, gold.items)
        first, second = answer.items, gold.items
        if answer.kind is Kind.SET:
            first = self._distinct(first)
        if gold.kind is Kind.SET:
            second = self._distinct(second)
        return self._equal_in_any_order(first, second)

    def _equal_in_order(self, answer: Sequence[Answer], gold: Sequence[Answer]) -> bool:
        return len(answer) == len(gold) and all(self.equal(one, other) for one, other in zip(answer, gold, strict=True))

    def _equal_in_any_order(self, answer: Sequence[Answer], gold: Sequence[Answer]) -> bool:
        if len(answer) != len(gold):
            return False
        left = list(gold)
        for item in answer:
            match = next((other for other in left if self.equal(item, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True

    def _distinct(self, items: Sequence[Answer]) -> list[Answer]:
        distinct: list[Answer] = []
        for item in items:
            if not any(self.equal(item, other) for other in distinct):
                distinct.append(item)
        return distinct

    def _equal_singleton(self, answer: Answer, gold: Answer) -> bool:
        """Compare a set of one element with the element."""
        answer, gold = (
            side.items[0] if isinstance(side, Collection) and side.kind is Kind.SET and len(side.items) == 1 else side
            for side in (answer, gold)
        )
        return not (isinstance(answer, Collection) or isinstance(gold, Collection)) and self.equal(answer, gold)


_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def _letters(side: Answer) -> str:
    """Return the text of a word or symbol; empty for anything else."""
    if isinstance(side, Word):
        return side.text
    return side.text if isinstance(side, Value) and re.fullmatch("[a-zA-Z ]+", side.text) else ""


def _sides(side: Answer) -> Equation | None:
    if isinstance(side, Equation):
        return side
    if isinstance(side, Assignment) and len(side.values) == 1 and isinstance(value := side.values[0], Value):
        return Equation((side.left, value.text), ("=",))
    return None


def _difference(sides: Sequence[str]) -> str:
    return f"({sides[0]})-({sides[1]})"


def _is_system(collection: Collection) -> bool:
    """Return whether a collection assigns values to several names; compared with values without names, its order then matters."""
    names = {item.name for item in collection.items if isinstance(item, Assignment)}
    return len(names) > 1


def _is_prose(text: str) -> bool:
    r"""Return whether a text has words, which algebra cannot parse: `3 hours 20 minutes`. Names of LaTeX commands do not count."""
    plain = re.sub(r"\\(?:begin|end|operatorname|mathbb|mathcal)\{[^{}]*\}|\\[a-zA-Z]+", " ", text)
    return re.search(r"\\text ?\{ *[a-zA-Z]{2}", text) is not None or re.search("[a-zA-Z]{4}", plain) is not None
