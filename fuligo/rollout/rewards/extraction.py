"""Extraction of the answer from a response."""

from __future__ import annotations

import re

from fuligo.answers.statement import last_boxed

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

    Markdown's asterisks and a closing full stop are no part of it.
    """
    lines = _ANSWER_LINE.findall(response[-DAPO_TAIL_CHARS:])
    return lines[-1].strip().rstrip("*").rstrip(".").rstrip("*").strip() or None if lines else None
