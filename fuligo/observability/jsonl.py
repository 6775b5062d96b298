"""Files with one JSON object per line. A crash damages at most the last line, which is removed when the file is opened again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from fuligo.errors import ConfigError
from fuligo.formats.disk import writing

Record = dict[str, Any]
"""Line of a file: a flat JSON object. A float that is not finite is written as null."""


class JsonLines:
    """File to which records are appended; each is handed to the operating system before `append` returns."""

    def __init__(self, path: Path) -> None:
        """Open `path` to continue it; a last line torn by a crash is removed."""
        self.path = path
        self._fd = open_to_append(path)

    def append(self, record: Record) -> None:
        """Append a record. Raises FuligoError if the file cannot be written."""
        append(self._fd, orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE), self.path)

    def cut_back(self, keep: Callable[[Record], bool]) -> None:
        """Truncate the file before the first record that `keep` rejects. Raises ConfigError if a line is not JSON."""
        end = 0
        for line_end, record in _parse(self.path):
            if not keep(record):
                break
            end = line_end
        os.truncate(self.path, end)

    def close(self) -> None:
        os.close(self._fd)


def read_json_lines(path: Path) -> list[Record]:
    """Read all complete records of a file that may still be growing. Raises ConfigError if a line is not JSON."""
    return [record for _, record in _parse(path)]


def _parse(path: Path) -> list[tuple[int, Record]]:
    """Return every complete record with the offset of the end of its line. Raises ConfigError if a line is not JSON."""
    records: list[tuple[int, Record]] = []
    offset = 0
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        offset += len(line) + 1
        try:
            records.append((offset, orjson.loads(line)))
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"cannot read {path}: line {number} is not JSON ({error}); fix or remove the file, then resume") from None
    return records


def open_to_append(path: Path) -> int:
    """Open a file to append to and return its descriptor; a last line torn by a crash is removed first."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def append(fd: int, data: bytes, path: Path) -> None:
    """Append data to a file, in one write if the system accepts it at once, as it does for regular files.

    Raises FuligoError if the file cannot be written.
    """
    rest = memoryview(data)
    with writing(path):
        while rest:
            rest = rest[os.write(fd, rest) :]
