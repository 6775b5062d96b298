"""What the footer of a parquet file tells about its columns without reading them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.parquet as pq

Plain = int | str | bool


@dataclass(frozen=True, slots=True)
class Footer:
    """Least and greatest values, by row group. Files of other writers may have none."""

    metadata: pq.FileMetaData

    def constant(self, name: str) -> Plain | None:
        """What a column of integers, booleans or words has in every row; None where rows differ or are null, or it is not told."""
        bounds = list(self._bounds(name))
        if not bounds or any(least != bounds[0][0] or most != bounds[0][0] for least, most in bounds):
            return None
        return bounds[0][0]

    def greatest(self, name: str) -> int | None:
        """Of a column of integers, nulls aside."""
        bounds = list(self._bounds(name, nulls=True))
        return max(int(most) for _, most in bounds) if bounds else None

    def _bounds(self, name: str, *, nulls: bool = False) -> Iterator[tuple[Plain, Plain]]:
        """Least and greatest of each row group that has values; nothing at all where one does not tell."""
        at = self._position(name)
        found: list[tuple[Plain, Plain]] = []
        for group in range(self.metadata.num_row_groups if at is not None else 0):
            column = self.metadata.row_group(group).column(at)
            statistics = column.statistics if column.is_stats_set else None
            if statistics is None or (not nulls and statistics.null_count != 0):
                return
            if statistics.has_min_max and isinstance(statistics.min, Plain):
                found.append((statistics.min, statistics.max))
            elif statistics.num_values:
                return
        yield from found

    def _position(self, name: str) -> int | None:
        if not self.metadata.num_row_groups:
            return None
        first = self.metadata.row_group(0)
        return next((at for at in range(first.num_columns) if first.column(at).path_in_schema == name), None)
