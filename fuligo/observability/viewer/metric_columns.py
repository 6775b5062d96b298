"""Columns of `metrics.jsonl`, which grow with the file."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from fuligo.observability.viewer.tail import LineReader

MAX_STEP = 2**31
MAX_INTEGER = 2**53
"""Largest integer that is exact in a browser."""
Values = list[float | None]
"""Values by row; None if a step lacks the key or its value was not finite."""


class MetricColumns(LineReader):
    """Columns of all keys; rows are steps, in the order of the file."""

    def __init__(self, path: Path, step_key: str = "step") -> None:
        super().__init__(path)
        self._step_key = step_key

    def _reset(self) -> None:
        self.num_rows = 0
        self.num_damaged = 0
        self.columns: dict[str, Values] = {}

    def column(self, key: str) -> Values:
        """Return the values of a key, one per row."""
        values = self.columns.get(key, [])
        return values + [None] * (self.num_rows - len(values))

    def latest(self, key: str) -> float | None:
        values = self.columns.get(key, [])
        return values[-1] if len(values) == self.num_rows and values else None

    @property
    def num_done(self) -> int:
        """Number of complete rollouts."""
        latest = self.latest("step")
        return 0 if latest is None else int(latest) + 1

    @property
    def steps(self) -> Values:
        return self.column(self._step_key)

    def tokens(self) -> list[float]:
        """Return the tokens sampled up to each row."""
        total, sums = 0.0, []
        for value in self.column("rollout/num_tokens"):
            total += value or 0
            sums.append(total)
        return sums

    def row_of_step(self, step: int) -> int | None:
        """Return the row of a step, usually the step itself; None if there is none."""
        steps = self.columns.get(self._step_key, [])
        if step < len(steps) and steps[step] == step:
            return step
        return steps.index(step) if step in steps else None

    def _add(self, line: bytes) -> None:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        step = record.get(self._step_key) if isinstance(record, dict) else None
        if not isinstance(record, dict) or step is None or not _is_number(step) or not 0 <= step < MAX_STEP:
            self.num_damaged += bool(line.strip())
            return
        row = self.num_rows
        for key, value in record.items():
            column = self.columns.setdefault(str(key), [])
            if len(column) < row:
                column.extend([None] * (row - len(column)))
            column.append(_rounded(key, value))
        self.num_rows += 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rounded(key: str, value: Any) -> float | None:
    """Round to six significant digits, times to 0.01 s, to keep answers small; integers below `MAX_INTEGER` stay exact.

    Return None for a value that is not a finite number.
    """
    if not _is_number(value):
        return None
    if key == "time":
        return round(value, 2)
    return value if isinstance(value, int) and abs(value) < MAX_INTEGER else float(f"{value:.6g}")


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def median(values: Sequence[float]) -> float | None:
    """Return the median; None without values."""
    return statistics.median(values) if values else None
