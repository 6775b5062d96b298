"""Judge of mathematical equality for a reward worker (`worker.py`), with sympy."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # the worker runs this file by path, perhaps without an installed fuligo

from fuligo.answers.algebra import equal_expressions
from fuligo.answers.equality import equal_answers


def prepare() -> None:
    """Compare once, so that sympy has imported all that it needs."""
    equal_expressions("x", "y")


def judge(answer: str, golds: list[str]) -> bool:
    """Return whether the answer equals any of the golds."""
    return any(equal_answers(answer, gold, equal_expressions) for gold in golds)
