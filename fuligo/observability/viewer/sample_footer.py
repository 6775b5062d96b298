"""What the footer of a parquet file tells about its columns without reading them."""

from __future__ import annotations

import pyarrow.parquet as pq

Plain = int | str | bool


class Footer:
    """Least and greatest values, by row group. Files of other writers may have none."""

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self._groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._positions = {metadata.schema.column(at).path: at for at in range(metadata.num_columns)}

    def constant(self, name: str) -> Plain | None:
        """What a column of integers, booleans or words has in every row; None where rows differ or are null, or it is not told."""
        value: Plain | None = None
        for group in self._groups:
            bounds = self._bounds(group, name)
            if bounds is None or bounds[0] != bounds[1] or bounds[2] or value not in (None, bounds[0]):
                return None
            value = bounds[0]
        return value

    def greatest(self, name: str) -> int | None:
        """Of a column of integers, nulls aside; None where it has none, or no group tells."""
        bounds = [self._bounds(group, name) for group in self._groups]
        return max((int(found[1]) for found in bounds if found is not None), default=None)

    def _bounds(self, group: pq.RowGroupMetaData, name: str) -> tuple[Plain, Plain, int] | None:
        """Least and greatest value, and the number of nulls."""
        at = self._positions.get(name)
        statistics = None if at is None else group.column(at).statistics
        if statistics is None or not statistics.has_min_max or not isinstance(least := statistics.min, Plain):
            return None
        return least, statistics.max, statistics.null_count
