"""Extraction of the answer from a response."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

DAPO_TAIL_CHARS = 300
"""Characters at the end of a response in which DAPO looks for the answer."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (or `\fbox{...}`); None if there is none or the last one is never closed.

    Braces nest; escaped ones (`\{`) are text. Linear in the length of the text.
    """
    starts = [box.end() for box in _BOX.finditer(text)]
    if not starts:
        return None
    start = starts[-1]
    depth = 1
    for brace in _BRACE.finditer(text, start):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return text[start : brace.start()].strip()
    return None


def num_boxes(text: str) -> int:
    """Count the boxes, closed or not."""
    return len(_BOX.findall(text))


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
    """Return the text after the last `Answer:` within the last 300 characters, to the end of its line; None without one."""
    lines = _ANSWER_LINE.findall(response[-DAPO_TAIL_CHARS:])
    return lines[-1] if lines else None
