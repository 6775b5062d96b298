"""Rows of a prompt file by number, without holding the file in memory; `FILE@[a:b]` selects rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fuligo.data.open_file import OpenFile
from fuligo.errors import DataError

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<slice>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(?P<start>[+-]?\d+)?\s*:\s*(?P<stop>[+-]?\d+)?\s*")


class RowFile(Protocol):
    """Random access to the rows of a file."""

    path: Path
    content: OpenFile

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read a row.

        Raises:
            DataError: the row is malformed; names the file and the line
            DataChangedError: the file's content has changed since it was opened, or cannot be read any more
        """
        ...

    def place(self, row: int) -> str:
        """Return the place of a row for errors: `train.jsonl, line 12`."""
        ...


def open_rows(path: Path, columns: list[str]) -> RowFile:
    """Open a prompt file of any supported format; only `columns` of a columnar file are ever read.

    Raises:
        DataError: the file is missing, unreadable, empty, of an unknown format, or lacks a column
    """
    if path.is_dir():
        raise DataError(f"{path} is a directory; prompt data must be one jsonl or parquet file")
    if not path.exists():
        raise DataError(f"{path} does not exist (looked in {Path.cwd()})")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; rows are read in any order, which a pipe or device cannot do")
    try:
        rows = _open(path, columns)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(rows) == 0:
        raise DataError(f"{path} is empty: it has no rows")
    return rows


def _open(path: Path, columns: list[str]) -> RowFile:
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        from fuligo.data.jsonl_file import JsonlFile

        return JsonlFile(path)
    if path.suffix in (".parquet", ".pq"):
        from fuligo.data.parquet_file import ParquetFile

        return ParquetFile(path, columns)
    raise DataError(f"{path}: unknown format {path.suffix!r}; prompt data must be .jsonl (one JSON object per line) or .parquet")


@dataclass(slots=True, frozen=True)
class PromptPath:
    """File and slice of its rows, with Python's meaning of negative and open ends."""

    path: Path
    rows: slice

    @classmethod
    def parse(cls, text: str | Path) -> PromptPath:
        """Parse `FILE` or `FILE@[start:stop]`.

        Raises:
            DataError: the slice has another form
        """
        sliced = _SLICED.fullmatch(str(text))
        if sliced is None:
            return cls(Path(text), slice(None))
        bounds = _BOUNDS.fullmatch(sliced["slice"])
        if bounds is None:
            raise DataError(
                f"{text}: [{sliced['slice']}] is not a slice of rows; write FILE@[start:stop], for instance FILE@[:100] or FILE@[-50:]"
            )
        start, stop = (None if bound is None else int(bound) for bound in bounds.groups())
        return cls(Path(sliced["path"]), slice(start, stop))

    def select(self, num_rows: int) -> range:
        """Return the row numbers that the slice selects from a file of `num_rows` rows.

        Raises:
            DataError: the slice selects no row
        """
        selected = range(num_rows)[self.rows]
        if not selected:
            start, stop = self.rows.start, self.rows.stop
            bounds = f"[{'' if start is None else start}:{'' if stop is None else stop}]"
            raise DataError(f"{self.path}: the slice {bounds} of its {num_rows} rows is empty")
        return selected
