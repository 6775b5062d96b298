"""Random access to jsonl: one pass indexes the lines, each access parses its row."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuligo.data.open_file import OpenFile
from fuligo.errors import DataError

_CHUNK_BYTES = 8 * 1024**2
_NEWLINE, _RETURN = ord("\n"), ord("\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlFile:
    """File with one JSON object per line; empty lines are skipped. Takes 8 bytes per row, and one chunk while opening."""

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
            _check_surrogates(line, value)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.place(row)}: not UTF-8: {error}") from error
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(f"{self.place(row)}: {half} is an unpaired surrogate, which is not valid text") from error
        except json.JSONDecodeError as error:
            if row == 0 and line.lstrip().startswith(b"["):
                raise DataError(f"{self.path} is one JSON array over several lines; write one object per line") from error
            raise DataError(f"{self.place(row)}: not JSON: {error.msg} at column {error.colno}") from error
        except RecursionError as error:
            raise DataError(f"{self.place(row)}: not JSON that can be parsed: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.place(row)}: a row must be a JSON object, not {_json_name(value)}")
        return value

    def place(self, row: int) -> str:
        return f"{self.path}, line {self._line_number(int(self._starts[row]))}"

    def _line_number(self, offset: int) -> int:
        """Return the 1-based line number. It is counted for errors only, so the index needs no second array."""
        newlines = 0
        for start in range(0, offset, _CHUNK_BYTES):
            newlines += os.pread(self.content.descriptor, min(_CHUNK_BYTES, offset - start), start).count(b"\n")
        return newlines + 1


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


def _check_surrogates(line: bytes, value: object) -> None:
    """Check that no JSON escape leaves an unpaired surrogate, which tokenizers and text files cannot hold.

    Raises:
        UnicodeEncodeError: there is one
    """
    if b"\\ud" in line or b"\\uD" in line:
        json.dumps(value, ensure_ascii=False).encode()


def _json_name(value: object) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "a string", bool: "a boolean"}.get(type(value), "a number")
