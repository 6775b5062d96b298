"""Rows of a prompt file by number, without holding the file in memory, except CSV; `FILE@[a:b]` selects rows.

One pass over a jsonl file indexes its lines; each access parses its row.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fuligo.data.open_file import OpenFile
from fuligo.errors import DataError
from fuligo.quantities import count

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<slice>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(?P<start>[+-]?\d+)?\s*:\s*(?P<stop>[+-]?\d+)?\s*")


class RowFile(Protocol):
    """Random access to the rows of a file."""

    path: Path
    content: OpenFile

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read a row. Raises DataError if it is malformed, with file and line, and DataChangedError if the file has changed."""
        ...

    def place(self, row: int) -> str:
        """Return the place of a row for errors: `train.jsonl, line 12`."""
        ...


def open_rows(path: Path, columns: list[str]) -> RowFile:
    """Open a prompt file of any supported format; of a columnar file, only `columns` are read.

    Raises DataError if the file is missing, unreadable, empty, of an unknown format, or lacks a column.
    """
    if not path.is_file():
        raise DataError(f"{path} is not a regular file, but rows are read out of order; copy the content of a pipe or device to a file")
    try:
        rows = _open(path, columns)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(rows) == 0:
        raise DataError(f"{path} has no rows; give a file with at least one")
    return rows


def _open(path: Path, columns: list[str]) -> RowFile:
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return JsonlFile(path)
    from fuligo.data.columnar_file import ArrowFile, CsvFile, ParquetFile

    columnar = {".parquet": ParquetFile, ".pq": ParquetFile, ".arrow": ArrowFile, ".csv": CsvFile}.get(path.suffix)
    if columnar is None:
        raise DataError(
            f"{path}: unknown format {path.suffix!r}; prompt data must be .jsonl (one JSON object per line), .parquet, .arrow or .csv"
        )
    return columnar(path, columns)


@dataclass(slots=True, frozen=True)
class PromptPath:
    """Entry of --prompt-data, with a slice of its rows; negative and omitted bounds mean the same as in Python."""

    path: str
    """File, pattern, folder or dataset on the Hub; see `locate`."""
    rows: slice

    @classmethod
    def parse(cls, text: str | Path) -> Self:
        """Parse `FILE` or `FILE@[start:stop]`. Raises DataError if the slice has another form."""
        sliced = _SLICED.fullmatch(str(text))
        if sliced is None:
            return cls(str(text), slice(None))
        bounds = _BOUNDS.fullmatch(sliced["slice"])
        if bounds is None:
            raise DataError(
                f"{text}: [{sliced['slice']}] is not a slice of rows; write FILE@[start:stop], for instance FILE@[:100] or FILE@[-50:]"
            )
        start, stop = (None if bound is None else int(bound) for bound in bounds.groups())
        return cls(sliced["path"], slice(start, stop))

    def select(self, num_rows: int) -> range:
        """Return the row numbers that the slice selects from `num_rows` rows. Raises DataError if the slice selects no row."""
        selected = range(num_rows)[self.rows]
        if not selected:
            start, stop = self.rows.start, self.rows.stop
            bounds = f"[{'' if start is None else start}:{'' if stop is None else stop}]"
            raise DataError(f"{self.path}: the slice {bounds} of its {count(num_rows, 'row')} is empty; choose other bounds")
        return selected


_CHUNK_BYTES = 8 * 1024**2
_NEWLINE, _RETURN = ord("\n"), ord("\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlFile:
    """File with one JSON object per line; empty lines are skipped. Holds 8 bytes per row in memory, and one chunk while opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = OpenFile(path)
        self._starts = line_starts(self.content.descriptor)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        start, stop = int(self._starts[row]), int(self._starts[row + 1])
        line = self.content.read(start, stop)
        if start == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        try:
            value = json.loads(line.decode().strip())
            if b"\\ud" in line or b"\\uD" in line:
                json.dumps(value, ensure_ascii=False).encode()  # raises if an escape leaves an unpaired surrogate
        except UnicodeDecodeError as error:
            raise DataError(f"{self.place(row)}: not UTF-8 ({error}); convert the file to UTF-8") from error
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(f"{self.place(row)}: {half} is an unpaired surrogate, which is not valid text; remove it") from error
        except json.JSONDecodeError as error:
            if row == 0 and line.lstrip().startswith(b"["):
                raise DataError(f"{self.path} is one JSON array over several lines; write one object per line") from error
            raise DataError(f"{self.place(row)}: not JSON ({error.msg} at column {error.colno}); correct or remove the line") from error
        except (RecursionError, ValueError) as error:  # Python refuses integers of more than 4,300 digits
            raise DataError(f"{self.place(row)}: not JSON that can be parsed ({error}); correct or remove the line") from error
        if not isinstance(value, dict):
            name = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
            raise DataError(f"{self.place(row)}: a row must be a JSON object, not {name}")
        return value

    def place(self, row: int) -> str:
        """Return `FILE, line 12`. Lines are counted for errors only, so the index needs no second array."""
        newlines, offset = 0, int(self._starts[row])
        for start in range(0, offset, _CHUNK_BYTES):
            newlines += os.pread(self.content.descriptor, min(_CHUNK_BYTES, offset - start), start).count(b"\n")
        return f"{self.path}, line {newlines + 1}"


def line_starts(descriptor: int) -> NDArray[np.int64]:
    """Return [rows + 1] byte offsets of the lines that are not empty; the last entry is the size of the file."""
    newline_chunks: list[NDArray[np.int64]] = []
    returns_seen = False
    size = 0
    while chunk := os.pread(descriptor, _CHUNK_BYTES, size):
        newline_chunks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + size)
        returns_seen = returns_seen or _RETURN in chunk
        size += len(chunk)
    newlines = np.concatenate([*newline_chunks, np.array([size], np.int64)])
    starts = np.concatenate([np.zeros(1, np.int64), newlines[:-1] + 1])
    lengths = newlines - starts
    blank = lengths == 0
    if returns_seen:
        for line in np.flatnonzero(lengths == 1):
            blank[line] = os.pread(descriptor, 1, int(starts[line]))[0] == _RETURN
    return np.append(starts[~blank], size)
