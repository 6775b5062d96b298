"""Incremental reading of a growing file of lines."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

CHUNK_BYTES = 4 * 1024**2


class Tail:
    """Reader of complete lines as they are added; an incomplete last line is read once it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        """Counter, incremented when the file was truncated or replaced, which invalidates what was read before."""
        self.offset = 0
        """Bytes read, complete lines only."""
        self._identity: int | None = None
        self._last_byte = b""

    def read(self, max_bytes: int = CHUNK_BYTES) -> list[bytes]:
        """Return the next complete lines without their ends; empty if nothing is new or there is no file."""
        try:
            with self.path.open("rb") as file:
                self._notice_restart(file)
                file.seek(self.offset)
                data = file.read(max_bytes)
                end = data.rfind(b"\n") + 1
                while not end and len(data) >= max_bytes and (more := file.read(max_bytes)):
                    data += more  # a line longer than the limit
                    end = data.rfind(b"\n") + 1
        except OSError:
            return []
        self.offset += end
        if end:
            self._last_byte = data[max(0, end - 64) : end]
        return data[: end - 1].split(b"\n") if end else []

    @property
    def size_bytes(self) -> int:
        """Return the current size of the file; 0 without one."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _notice_restart(self, file: BufferedReader) -> None:
        """Detect that the file was truncated by a resumed run, even if it has grown again since: the end of the part read differs then."""
        state = os.fstat(file.fileno())
        file.seek(max(0, self.offset - len(self._last_byte)))
        same = state.st_ino == self._identity or self._identity is None
        if not same or state.st_size < self.offset or file.read(len(self._last_byte)) != self._last_byte:
            self.generation += 1
            self.offset, self._last_byte = 0, b""
        self._identity = state.st_ino
