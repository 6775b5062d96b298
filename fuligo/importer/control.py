"""How a script leaves a place early. None of these leaves the package."""

from __future__ import annotations


class ScriptExit(Exception):
    """`exit`, or a failure under `set -e`."""

    def __init__(self, status: int, line: int) -> None:
        super().__init__(status)
        self.status, self.line = status, line


class LoopControl(Exception):
    """`break` and `continue`."""

    def __init__(self, levels: int, goes_on: bool) -> None:
        super().__init__(levels)
        self.levels, self.goes_on = levels, goes_on


class FunctionReturn(Exception):
    """`return`."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
