"""Random access to the rows of parquet, Arrow and CSV files."""

import csv
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fuligo.data.open_file import OpenFile
from fuligo.errors import DataError

_CACHE_BYTES = 256 * 1024**2
"""Size of the cache of decoded row groups. Shuffling a larger file decodes groups repeatedly; write small row groups, or jsonl."""


class ColumnarFile:
    """File read in row groups, and only in the given columns; the most recently used groups are cached, up to 256 MiB.

    Subclasses return the columns and the sizes of the row groups in `_open`, and read one row group in `_read`.
    """

    format: ClassVar[str]

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path = path
        self.content = OpenFile(path)
        self._columns = columns
        # Opened by descriptor: the path may name another file by now. Never memory-mapped: see `OpenFile`.
        self._source = pa.PythonFile(os.fdopen(self.content.descriptor, "rb", buffering=0, closefd=False), mode="r")
        try:
            present, sizes = self._open()
            if missing := [column for column in columns if column not in present]:
                names = ", ".join(map(repr, missing))
                fix = f"set --input-key, --label-key, ... to columns of {', '.join(present)}"
                if len(present) == 1 and (other := re.search(r"[;\t|]", present[0])):
                    fix = f"its first line is {present[0]!r}: separate the columns with commas instead of {other[0]!r}"
                raise DataError(f"cannot use {path}: no column {names}; {fix}")
        except (pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"cannot read {path}: it is not {self.format} file ({error}); convert it, or correct its ending") from error
        self._group_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._cached: OrderedDict[int, pa.Table | pa.RecordBatch] = OrderedDict()

    def _open(self) -> tuple[Sequence[str], list[int]]:
        """Return the columns of the file and the number of rows in each row group."""
        raise NotImplementedError

    def _read(self, group: int) -> pa.Table | pa.RecordBatch:
        """Read the chosen columns of a row group."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._group_starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.content.check()
        group = int(np.searchsorted(self._group_starts, row, side="right")) - 1
        table = self._group(group)
        return table.slice(row - int(self._group_starts[group]), 1).to_pylist()[0]

    def place(self, row: int) -> str:
        return f"{self.path}, row {row + 1}"

    def _group(self, group: int) -> pa.Table | pa.RecordBatch:
        if group in self._cached:
            self._cached.move_to_end(group)
            return self._cached[group]
        try:
            table = self._read(group)
        except (pa.ArrowException, EOFError, OSError) as error:
            self.content.check()
            raise DataError(f"cannot read row group {group} of {self.path}: {error}; write the file again") from error
        self.content.check()
        self._cached[group] = table
        while len(self._cached) > 1 and sum(cached.nbytes for cached in self._cached.values()) > _CACHE_BYTES:
            self._cached.popitem(last=False)
        return table


class ParquetFile(ColumnarFile):
    """Parquet file."""

    format = "a parquet"

    def _open(self) -> tuple[Sequence[str], list[int]]:
        self._file = pq.ParquetFile(self._source)
        metadata = self._file.metadata
        return self._file.schema_arrow.names, [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def _read(self, group: int) -> pa.Table:
        return self._file.read_row_group(group, columns=self._columns)


class ArrowFile(ColumnarFile):
    """Arrow IPC stream, as `datasets` writes it, or Arrow IPC file (Feather). One pass finds the record batches of a stream."""

    format = "an Arrow"

    def _open(self) -> tuple[Sequence[str], list[int]]:
        magic = self._source.read(6)
        self._source.seek(0)
        self._file = pa.ipc.open_file(self._source) if magic == b"ARROW1" else None
        if self._file is not None:
            return self._file.schema.names, [self._file.get_batch(number).num_rows for number in range(self._file.num_record_batches)]
        self._schema = pa.ipc.read_schema(self._source)
        self._offsets, sizes = [], []
        while True:
            offset = self._source.tell()
            try:
                message = pa.ipc.read_message(self._source)
            except EOFError:
                return self._schema.names, sizes
            if message.type != "record batch":
                raise DataError(f"{self.path} holds dictionary-encoded columns, which cannot be read out of order; convert it to parquet")
            self._offsets.append(offset)
            sizes.append(pa.ipc.read_record_batch(message, self._schema).num_rows)

    def _read(self, group: int) -> pa.RecordBatch:
        if self._file is not None:
            return self._file.get_batch(group).select(self._columns)
        self._source.seek(self._offsets[group])
        return pa.ipc.read_record_batch(pa.ipc.read_message(self._source), self._schema).select(self._columns)


class CsvFile(ColumnarFile):
    """CSV file with a header, held in memory. Every value is text, so that a label 007 stays as it is; an empty one is null."""

    format = "a CSV"

    def _open(self) -> tuple[Sequence[str], list[int]]:
        with os.fdopen(self.content.descriptor, encoding="utf-8-sig", newline="", closefd=False) as text:
            names = next(csv.reader(text), [])
        self._source.seek(0)
        if not names:
            return names, []
        self._table = pa_csv.read_csv(
            self._source,
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=True
            ),
        )
        return names, [self._table.num_rows]

    def _read(self, group: int) -> pa.Table:
        return self._table.select(self._columns)
