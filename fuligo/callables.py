"""Functions that a program passed to `fuligo.train` and that no module holds under their name: lambdas, closures, cells of a notebook.

Each is an attribute here, so that flags name it like any hook: `fuligo.callables.reward_1`. Other processes do not have them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

MODULE = __name__


def register(name: str, function: Callable[..., Any]) -> str:
    """Keep a function and return its dotted path. A function that is registered already keeps its path."""
    held = globals()
    for number in range(1, len(held) + 1):
        attribute = f"{name}_{number}"
        if held.setdefault(attribute, function) is function:
            return f"{MODULE}.{attribute}"
    raise AssertionError("unreachable: one of these names is always free")


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"{MODULE} has no {name}: it is a function of the process that started the run; move it to a module")
