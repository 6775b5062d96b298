r"""Reward for multiple choice, as in GPQA (Rein et al. 2023, arXiv:2311.12022): compares the chosen letter with the correct one.

Rows have slime's format (`slime/rollout/rm_hub/gpqa.py`): a label, and the metadata `choices`, `valid_letters` and `correct_letter`.
Each is optional, but the label or `correct_letter` must be given.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

from fuligo.errors import RewardError
from fuligo.rollout.rewards.extraction import gold_answers, last_boxed

_LETTERS = tuple(string.ascii_uppercase[:10])
"""Letters of a question whose row has neither choices nor letters."""
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\*\*|__|[`$]|\\[()\[\]]")
_MAX_WRAPPERS = 4
"""Depth to which nested wrappers are removed."""
_ALONE = re.compile(r"[(\[{]?([A-Za-z])[)\]}]?[.:,;!]?")
_LEADING = re.compile(r"[(\[{]([A-Za-z])[)\]}](?!\w)|(?!I [a-z])([A-Z])(?![\w'’^/=+-]|\s*[=+<>])")
_LEADING_BRACKET = re.compile(r"([A-Za-z])[)\]](?=\s|$)")
_STATEMENT = re.compile(
    r"\b(?:answer|option|choice)\b[\s*_]*(?:(?:is|would be|must be|should be)\b|[:=])[\s*_:]*"
    r"(?:(?:therefore|thus|then|clearly|likely|most likely)\b,?\s*)?(?:(?:the\s+)?(?:option|choice|letter)\b[\s:]*)?(?=(.{0,1000}))",
    re.IGNORECASE,
)
_VERDICT = re.compile(r"(?<![\w'’])([A-Z])(?!\w)[)\]*_]*\s+is\s+(?:therefore\s+)?(?:the\s+)?(?:correct|right|best)\b")
_SINGLE_LETTER = re.compile(r"[(\[]([A-Za-z])[)\]]|(?<![\w'’^/=+-])(?!I [a-z])(?!A [a-z])([A-Z])(?![\w'’^/=+-])")


@dataclass(slots=True, frozen=True)
class Question:
    """Choices of a question, and which of them are correct."""

    letters: tuple[str, ...]
    choices: tuple[str, ...] = ()
    """Texts, one per letter; empty if the row has none."""
    correct: frozenset[str] = frozenset()
    """Letters of the correct choices."""

    @classmethod
    def of(cls, label: Any, metadata: dict[str, Any]) -> Question:
        """Return the question of a row. Raises RewardError if label and metadata do not say which choice is right, or disagree."""
        offered = _offered(metadata)
        given = metadata.get("correct_letter")
        if label is None and given is None:
            raise RewardError('neither --label-key nor metadata["correct_letter"] says which choice is right; set one of them')
        by_letter = None if given is None else offered.letter_of(given, 'metadata["correct_letter"]')
        if by_letter is not None and (label is None or (isinstance(label, str) and offered.named_alone(label) is None)):
            return cls(offered.letters, offered.choices, frozenset({by_letter}))  # a label that names no choice does not contradict it
        entries = label if isinstance(label, list | tuple) and label else [label]
        by_label = frozenset(offered.letter_of(entry, "the label") for entry in entries)
        if by_letter is not None and by_letter not in by_label:
            raise RewardError(
                f'the label says {", ".join(sorted(by_label))} but metadata["correct_letter"] says {by_letter}; correct the row',
            )
        return cls(offered.letters, offered.choices, by_label if by_letter is None else frozenset({by_letter}))

    def letter_of(self, value: Any, what: str) -> str:
        """Return the letter of a choice given by its letter, position (from 0) or text. Raises RewardError if there is none."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            if 0 <= value < len(self.letters):
                return self.letters[value]
            raise RewardError(f"{what} is {value}, but positions range from 0 to {len(self.letters) - 1}")
        (text,) = gold_answers(value)
        letter = self.named_alone(text)
        if letter is None:
            known = ", ".join(self.letters) + (f", or the text of one of {len(self.choices)} choices" if self.choices else "")
            raise RewardError(f"{what} is {value!r:.80}, but it must be one of {known}")
        return letter

    def named_alone(self, text: str) -> str | None:
        """Return the letter of a choice if the whole `text` is that letter, bracketed or not, or the choice's text; else None."""
        text = _bare(text)
        alone = _ALONE.fullmatch(text)
        if alone is not None and alone[1].upper() in self.letters:
            return alone[1].upper()
        same = [letter for letter, choice in zip(self.letters, self.choices) if _folded(choice) == _folded(text)]
        return same[0] if len(same) == 1 else None

    def named_first(self, text: str) -> str | None:
        """Return the letter of the choice that `text` is or begins with, else None. Texts take precedence: "A" may be the article."""
        letter = self.named_alone(text)
        if letter is not None:
            return letter
        bare, folded = _bare(text), _folded(text)
        begun = {_folded(choice): letter for letter, choice in zip(self.letters, self.choices) if _begins(folded, _folded(choice))}
        if begun:
            return begun[max(begun, key=len)]
        leading = _LEADING.match(bare) or _LEADING_BRACKET.match(bare)
        letter = next(filter(None, leading.groups())).upper() if leading else None
        return letter if letter in self.letters else None

    def mentioned(self, text: str) -> str | None:
        """Return the letter of the only choice whose text occurs in `text`, else None.

        A choice's text that is part of a longer choice's text does not count if the longer one occurs too.
        """
        text = f" {_folded(text)} "
        found: dict[str, str] = {}
        for letter, choice in zip(self.letters, self.choices):
            folded = _folded(choice)
            if folded and re.search(rf"(?<!\w){re.escape(folded)}(?!\w)", text):
                found[letter] = folded
        longest = [letter for letter, choice in found.items() if not any(choice in other and choice != other for other in found.values())]
        return longest[0] if len(longest) == 1 else None


def chosen(response: str, question: Question) -> str | None:
    r"""Return the letter that a response chooses, or None.

    The text after the last `</think>` is searched in this order:

    1. the last `\boxed{}`, if it names a choice by its letter or text;
    2. the last statement like "answer: (C)", "the correct option is C" or "C is correct" that names a choice;
    3. the last line if it is a choice, else the last single letter in it;
    4. the only choice whose text is mentioned.
    """
    solution = response.rpartition("</think>")[2]
    boxed = last_boxed(solution)
    if boxed is not None and (letter := question.named_first(boxed)):
        return letter
    return _stated(solution, question) or _only_letter(solution, question) or question.mentioned(solution)


def gpqa_reward(answer: str | None, label: Any, metadata: dict[str, Any]) -> float:
    """Return 1 if the answer chooses a correct choice, else 0. Raises RewardError like `Question.of`."""
    question = Question.of(label, metadata)
    return float(answer is not None and chosen(answer, question) in question.correct)


def _offered(metadata: dict[str, Any]) -> Question:
    """Read the choices and their letters from the metadata. Raises RewardError if they are malformed."""
    choices, letters = metadata.get("choices"), metadata.get("valid_letters")
    if isinstance(choices, dict):
        keys = [str(key).strip().upper() for key in choices]
        letters = keys if letters is None and all(len(key) == 1 and key.isalpha() for key in keys) else letters
        choices = list(choices.values())
    if not isinstance(choices, list | tuple | None) or not isinstance(letters, list | tuple | str | None):
        raise RewardError(f'metadata["choices"] and ["valid_letters"] must be lists, not {choices!r:.60} and {letters!r:.60}')
    texts = tuple(str(choice) for choice in choices or ())
    if letters:
        named = tuple(str(letter).strip().upper() for letter in letters)
    else:
        named = tuple(string.ascii_uppercase[: len(texts)]) if texts else _LETTERS
    if any(len(letter) != 1 or letter not in string.ascii_uppercase for letter in named) or (texts and len(named) != len(texts)):
        raise RewardError(
            f"{len(texts) or 'the'} choices cannot have the letters {', '.join(named)}: each choice needs one letter from A to Z"
        )
    return Question(named, texts)


def _stated(text: str, question: Question) -> str | None:
    found: list[tuple[int, str]] = []
    for statement in _STATEMENT.finditer(text):
        if letter := question.named_first(statement[1]):
            found.append((statement.end(), letter))
    found += [(verdict.start(), verdict[1]) for verdict in _VERDICT.finditer(text) if verdict[1] in question.letters]
    return max(found)[1] if found else None


def _only_letter(text: str, question: Question) -> str | None:
    lines = text.strip().splitlines()
    if not lines:
        return None
    letters = [next(filter(None, found.groups())).upper() for found in _SINGLE_LETTER.finditer(_bare(lines[-1]))]
    return question.named_alone(lines[-1]) or next((letter for letter in reversed(letters) if letter in question.letters), None)


def _begins(text: str, words: str) -> bool:
    return bool(words) and text.startswith(words) and not text[len(words) : len(words) + 1].isalnum()


def _bare(text: str) -> str:
    """Remove the text markup of LaTeX and Markdown."""
    for _ in range(_MAX_WRAPPERS):
        text = _WRAPPER.sub(r"\1", text)
    return _MARKUP.sub("", text).strip(" \t\n*_")


def _folded(text: str) -> str:
    """Normalize a text for comparison: lower case, single spaces, no markup and no final period."""
    return " ".join(_bare(text).casefold().split()).rstrip(" .")
