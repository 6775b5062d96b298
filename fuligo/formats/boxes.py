"""Rectangles that cover a range of a flattened matrix: the form in which a distributed checkpoint stores part of a tensor.

The distributed optimizer splits flattened weights at arbitrary offsets. Stored as rectangles, each rank's shard is written and read
without a gather.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Box:
    """Rectangle of a tensor whose elements are consecutive in the flattened tensor."""

    start: int
    """Index of the first element in the flattened tensor."""
    offset: tuple[int, ...]
    """Index of the rectangle's first corner."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Cover the elements [start, end) of a flattened vector or matrix with at most three boxes: a row's end, whole rows, a row's start."""
    assert len(shape) in (1, 2), "weights are vectors and matrices"
    if len(shape) == 1:
        return [Box(start, (start,), (end - start,))] if end > start else []
    columns = shape[1]
    found: list[Box] = []
    while start < end:
        row, column = divmod(start, columns)
        if column or end - start < columns:
            width = min(columns - column, end - start)
            box = Box(start, (row, column), (1, width))
        else:
            box = Box(start, (row, 0), ((end - start) // columns, columns))
        found.append(box)
        start += box.size
    return found
