"""Extraction of the answer from a response, and of the correct answers from a label."""

import re
from typing import Any

from fuligo.answers.statement import last_boxed
from fuligo.errors import RewardError

_ANSWER_LINE = re.compile(r"answer\s*\**\s*:\s*\**\s*([^\n]+)", re.IGNORECASE)

DAPO_TAIL_CHARS = 300
"""Characters at the end of a response in which DAPO looks for the answer."""


def after_thinking(response: str) -> str | None:
    """Return the text after the last `</think>`, or else after the first `###Response`; None without either marker."""
    _, thought, solution = response.rpartition("</think>")
    if thought:
        return solution
    _, marked, solution = response.partition("###Response")
    return solution if marked else None


def deepscaler_answer(response: str) -> str | None:
    """Return the content of the last box after the thinking; None if the thinking does not end or there is no box."""
    solution = after_thinking(response)
    return None if solution is None else last_boxed(solution)


def answer_line(response: str) -> str | None:
    """Return the text after the last `Answer:` within the last 300 characters, to the end of its line; None without one.

    Markdown asterisks around it and a final period are removed.
    """
    lines = _ANSWER_LINE.findall(response[-DAPO_TAIL_CHARS:])
    return lines[-1].strip().rstrip("*").rstrip(".").rstrip("*").strip() or None if lines else None


def gold_answers(label: Any) -> list[str]:
    r"""Return the correct answers in a label: a string, a number, an answer in a `\boxed{}`, or a list of alternatives.

    Raises RewardError if the label is missing, empty, or of another type.
    """
    if isinstance(label, list | tuple):
        if not label:
            raise RewardError("the label is an empty list, so no answer would be right; remove the row")
        return [answer for entry in label for answer in gold_answers(entry)]
    if isinstance(label, str):
        boxed = last_boxed(label)
        gold = label.strip() if boxed is None else boxed
        if not gold:
            raise RewardError(f"the label {label!r} is empty, so no answer would be right; remove the row")
        return [gold]
    if isinstance(label, int | float) and not isinstance(label, bool):
        return [str(label)]
    if label is None:
        raise RewardError("the sample has no label to compare with; name the column with --label-key")
    raise RewardError(f"a label must be a string, a number or a list of these, not {label!r:.80}")
