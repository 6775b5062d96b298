r"""The answer that a response states: its last `\boxed{}`, or else what follows "the answer is", or else its last number or formula."""

import re

from fuligo.answers.reading import is_name
from fuligo.answers.spelling import normalize
from fuligo.answers.units import KNOWN, split_unit

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;]|\\[()\[\]]|\\(?:quad|text\s*\{\s*(?:and|or)\s*\}|[,; ])|\band\b|\bor\b|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)

_MAX_TAIL_CHARS = 2000
"""Number of characters searched for an answer: the first ones after a marker, or the last ones of a response without a box or marker."""
_MAX_WHOLE_CHARS = 120
"""Longest text that can be an answer as a whole; longer texts are prose."""
_MARKER = re.compile(r"####|^\s*A:|\banswer\b[^:=\n]{0,40}?(?:\bis\b|\bare\b|:|=)\s*:?", re.IGNORECASE | re.MULTILINE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s+\S)")
_FORMULA = "|".join(
    (
        r"\$\$[^$]+\$\$",
        r"(?<![\\\d])\$(?:[^$\n\\]|\\.)+\$",
        r"\\\((?:[^\\\n]|\\(?!\)))+\\\)",
        r"\\\[(?:[^\\]|\\(?!\]))+\\\]",
        r"-?\\frac\{[^{}\n]*\}\{[^{}\n]*\}%?",
    )
)
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)"
_OPERAND = rf"\(?-?[$€£]?{_NUMBER}\)?"
_UNIT = "|".join(sorted(map(re.escape, KNOWN), key=len, reverse=True))
_PLAIN = rf"(?<![\w.^\\])(?:[-−]\s?)?{_OPERAND}(?:\s*[-+*/^×÷=]\s*{_OPERAND})*%?(?:\s?(?:{_UNIT})s?(?![\w/^]))?"
_TERM = re.compile(f"{_FORMULA}|{_PLAIN}")
_VERB = re.compile(r"\b(?:is|are)\b")
_ALTERNATIVE = re.compile(r"[\s*]*,?\s*\bor\b\s*")
_FURTHER = re.compile(r"[\s*]*(?:,\s*(?:and\b|or\b)?|\band\b|\bor\b|;)\s*")
_ONLY_FORMULA = re.compile(
    r"(?:\\[a-zA-Z]+|\\.|[^\w\\]|[\d_]|(?<![a-zA-Z])(?:[a-zA-Z]|and|or|sqrt|pi|sin|cos|tan|ln|log|exp)(?![a-zA-Z]))+"
)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (or `\fbox{...}`); None if there is none or the last one is never closed.

    Braces nest; escaped ones (`\{`) are text. Linear in the length of the text.
    """
    starts = [box.end() for box in _BOX.finditer(text)]
    end = _closing(text, starts[-1]) if starts else None
    return None if end is None else text[starts[-1] : end].strip()


def stated_answer(text: str) -> str | None:
    r"""Return the answer that a text states; None if it states none.

    Boxes separated only by commas or `and` are one answer: `\boxed{1}, \boxed{2}`. In a text without a box the answer follows the
    last "answer is", "Answer:" or "####"; without such words it is the last number or formula, with the alternatives that "or" joins to it.
    """
    if _BOX.search(text):
        return _boxed(text)
    text = text.strip()
    marker = None
    for marker in _MARKER.finditer(text):  # noqa: B007
        pass
    if marker is not None and (stated := _stated_answer(text[marker.end() :])):
        return stated
    return _whole(text) or _last_term(text[-_MAX_TAIL_CHARS:])


def _closing(text: str, start: int) -> int | None:
    """Return the position of the brace that closes a box whose content begins at `start`; None if none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.start()
    return None


def _boxed(text: str) -> str | None:
    """Return the contents of the last box and of the boxes before it that belong to the same answer, joined by commas.

    If all contents are equal, return one of them. Return None if the last box is never closed.
    """
    starts = list(_BOX.finditer(text))
    end = _closing(text, starts[-1].end())
    if end is None:
        return None
    contents, first = [text[starts[-1].end() : end].strip()], starts[-1].start()
    for box in reversed(starts[:-1]):
        end = _closing(text, box.end())
        if end is None or end > first or not _BETWEEN_BOXES.fullmatch(text, end + 1, first):
            break
        contents.append(text[box.end() : end].strip())
        first = box.start()
    if len(set(contents)) == 1:
        return contents[0]
    return ", ".join(reversed(contents))


def _stated_answer(text: str) -> str | None:
    """Return the answer in the first line or sentence of the text after a marker: all of it, or its first terms.

    Without terms, a short sentence is the answer. Return None if the sentence is empty or too long.
    """
    text = text.lstrip(" \t\n*:")[:_MAX_TAIL_CHARS]
    end = _SENTENCE_END.search(text)
    sentence = (text if end is None else text[: end.start()]).strip()
    if not sentence:
        return None
    if whole := _whole(sentence):
        return whole
    verb = _VERB.search(sentence)
    terms = _terms(sentence, 0 if verb is None else verb.end()) or _terms(sentence, 0)
    if not terms:
        return sentence.rstrip("*. ") if len(sentence) <= _MAX_WHOLE_CHARS else None
    start, stop = terms[0].span()
    while (separator := _FURTHER.match(sentence, stop)) and (term := _TERM.match(sentence, separator.end())):
        stop = term.end()
    return _last_side(sentence[start:stop])


def _terms(text: str, start: int) -> list[re.Match[str]]:
    """Return the numbers and formulas of a text. Formulas that only name a quantity (`$f(x)$`) count only if there are no others."""
    terms = list(_TERM.finditer(text, start))
    return [term for term in terms if not is_name(normalize(term[0]))] or terms


def _whole(text: str) -> str | None:
    """Return the text if all of it is a formula or a quantity; None if it is prose or too long."""
    bare = text.strip("* ").rstrip(".")
    if not bare or len(bare) > _MAX_WHOLE_CHARS or "\n" in bare or not (re.search(r"[\d\\]", bare) or len(bare) == 1):
        return None
    if _ONLY_FORMULA.fullmatch(bare) or split_unit(bare.replace("$", "")) is not None:
        return bare
    return None


def _last_term(text: str) -> str | None:
    """Return the last number or formula, with alternatives joined by `or` (formulas: also by commas and `and`); None without one."""
    terms = _terms(text, 0)
    if not terms:
        return None
    first = last = terms[-1]
    for term in reversed(terms[:-1]):
        joined = _FURTHER if "$" in first[0][:1] + term[0][:1] or "\\" in first[0][:1] + term[0][:1] else _ALTERNATIVE
        if not joined.fullmatch(text, term.end(), first.start()):
            break
        first = term
    return _last_side(text[first.start() : last.end()])


def _last_side(text: str) -> str:
    """Return the right side of a calculation without LaTeX, such as 14 for `7 * 2 = 14`; any other text unchanged."""
    return text if "$" in text or "\\" in text else text.rpartition("=")[2].strip()
