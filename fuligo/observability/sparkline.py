"""Sparkline: a curve in one line of text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """Return the curve of `values` in at most `width` characters; more values are averaged over equal intervals.

    Args:
        values: finite numbers, oldest first.
        width: characters.
        low: value of the lowest bar (default: the smallest value).
        high: value of the highest bar (default: the largest value).
    """
    points = _shorten(values, width)
    if not points:
        return ""
    bottom = min(points) if low is None else low
    span = (max(points) if high is None else high) - bottom
    if span <= 0:
        return _BARS[0] * len(points)
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, max(0, round((point - bottom) / span * top)))] for point in points)


def _shorten(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [position * len(values) // width for position in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
