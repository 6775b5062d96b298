"""Random access to parquet, by row group."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuligo.data.open_file import OpenFile
from fuligo.errors import DataError

_CACHE_BYTES = 256 * 1024**2
"""Size of the cache of decoded row groups. Shuffling a larger file decodes groups repeatedly: write small row groups, or jsonl."""


class ParquetFile:
    """File of which only the given columns are read; the most recently used row groups are cached, up to 256 MiB."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path = path
        self.content = OpenFile(path)
        try:
            # By descriptor: Arrow would open the path again, which may be another file by now.
            self._file = pq.ParquetFile(pa.PythonFile(os.fdopen(self.content.descriptor, "rb", buffering=0, closefd=False), mode="r"))
        except pa.ArrowInvalid as error:
            raise DataError(f"{path} is not a parquet file: {error}") from error
        present = self._file.schema_arrow.names
        missing = [column for column in columns if column not in present]
        if missing:
            raise DataError(f"{path}: no column {', '.join(map(repr, missing))}; it has {', '.join(present)}")
        self._columns = columns
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._group_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._cached: OrderedDict[int, pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return int(self._group_starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.content.check()
        group = int(np.searchsorted(self._group_starts, row, side="right")) - 1
        table = self._group(group)
        return table.slice(row - int(self._group_starts[group]), 1).to_pylist()[0]

    def place(self, row: int) -> str:
        return f"{self.path}, row {row + 1}"

    def _group(self, group: int) -> pa.Table:
        if group in self._cached:
            self._cached.move_to_end(group)
            return self._cached[group]
        try:
            table = self._file.read_row_group(group, columns=self._columns)
        except (pa.ArrowException, OSError) as error:
            self.content.check()
            raise DataError(f"{self.path}: cannot read row group {group}: {error}") from error
        self.content.check()
        self._cached[group] = table
        while len(self._cached) > 1 and sum(cached.nbytes for cached in self._cached.values()) > _CACHE_BYTES:
            self._cached.popitem(last=False)
        return table
