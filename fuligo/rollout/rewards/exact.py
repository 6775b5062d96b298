"""Equality of answers that needs no algebra: decided in microseconds, without importing sympy."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_FINDABLE = re.compile(r"[\d$\\\[]")
"""Characters of which every number and formula has at least one."""
_MAX_DIGITS = 100
_CLOSE = Decimal("1e-5")
"""Numbers further apart than this differ; closer ones are left to the symbolic comparison, which rounds to 6 decimals."""


def equal_exactly(answer: str, gold: str) -> bool | None:
    """Return whether two answers are equal if spelling or plain numbers decide it; None if it takes algebra."""
    answer, gold = _bare(answer), _bare(gold)
    if not answer or not gold:
        return False
    if answer == gold:
        return True
    answer_number, gold_number = _number(answer), _number(gold)
    if answer_number is None or gold_number is None:
        return None
    if answer_number == gold_number:
        return True
    return False if abs(answer_number - gold_number) > _CLOSE else None


def nothing_to_find(text: str) -> bool:
    """Return whether the text has no answer in any form that the symbolic comparison reads."""
    return _FINDABLE.search(text) is None


def is_number(text: str) -> bool:
    """Return whether the text is a plain number."""
    return _number(_bare(text)) is not None


def _bare(answer: str) -> str:
    """Remove surrounding white space and dollar signs."""
    answer = answer.strip()
    for delimiter in ("$$", "$"):
        if len(answer) > 2 * len(delimiter) and answer.startswith(delimiter) and answer.endswith(delimiter):
            return answer[len(delimiter) : -len(delimiter)].strip()
    return answer


def _number(text: str) -> Decimal | None:
    if len(text) > _MAX_DIGITS:
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return Decimal(text) if _NUMBER.fullmatch(text) else None
