"""A range of a flattened matrix as rectangles, which is how a distributed checkpoint describes a part of a tensor.

An optimizer that is spread over data-parallel ranks cuts the flattened weights anywhere; written as rectangles, each rank's share goes to
disk and comes back without being gathered.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Box:
    """Consecutive elements of a flattened tensor that are a rectangle of it."""

    start: int
    """Of the first element in the flattened tensor."""
    offset: tuple[int, ...]
    """Of the rectangle's first corner."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """The elements [start, end) of a flattened vector or matrix: at most the end of a row, whole rows, the beginning of a row."""
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
