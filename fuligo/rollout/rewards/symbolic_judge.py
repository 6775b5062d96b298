"""Judge of mathematical equality: compares answers with math-verify in a reward worker (`worker.py`). Imports nothing of fuligo."""

from __future__ import annotations


def prepare() -> None:
    """Import math-verify, which takes about a second."""
    import math_verify  # noqa: F401


def judge(answer: str, golds: list[str], *, is_text: bool) -> bool:
    """Return whether the answer equals any of the golds.

    Args:
        is_text: the answer is somewhere in a text and math-verify looks for it; otherwise all of `answer` is the answer.
    """
    from math_verify import parse, verify

    # math-verify's own deadlines are Python-level alarms: a C call outlasts them, and they would replace the worker's.
    found = parse(answer if is_text else f"\\boxed{{{answer}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return any(verify(parse(f"\\boxed{{{gold}}}", parsing_timeout=None), found, timeout_seconds=None) for gold in golds)  # pyright: ignore[reportArgumentType]
