"""Appending to files so that a crash tears one line at most."""

from __future__ import annotations

import os
from pathlib import Path

from fuligo.formats.disk import writing


def open_to_append(path: Path) -> int:
    """Open a file to append to and return its descriptor; a last line torn by a crash is removed first."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def append(fd: int, data: bytes, path: Path) -> None:
    """Append data to a file, in one write if the system accepts it at once, as it does for regular files.

    Raises:
        FuligoError: the file cannot be written.
    """
    rest = memoryview(data)
    with writing(path):
        while rest:
            rest = rest[os.write(fd, rest) :]
