"""Functions passed to `fuligo.train` that cannot be imported from a module: lambdas, closures, functions of a notebook.

Each becomes an attribute of this module, so that flags name it like any hook: `fuligo.callables.reward_1`. Other processes lack them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

MODULE = __name__


def register(name: str, function: Callable[..., Any]) -> str:
    """Make a function an attribute of this module and return its dotted path; registering it again returns the same path."""
    held = globals()
    for number in range(1, len(held) + 1):
        attribute = f"{name}_{number}"
        if held.setdefault(attribute, function) is function:
            return f"{MODULE}.{attribute}"
    raise AssertionError("unreachable: one of these names is always free")


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"cannot import {MODULE}.{name}: it exists only in the process that started the run; move it to a module")
