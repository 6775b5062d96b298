"""Incremental reading of a growing file of lines."""

import os
from abc import ABC, abstractmethod
from io import BufferedReader
from pathlib import Path

CHUNK_BYTES = 4 * 1024**2
MAX_CHUNKS = 64
"""Maximum number of chunks that one update reads by default; a longer file takes several updates."""
MAX_LINE_BYTES = 64 * 1024**2
"""Length of a line after which the rest of the file is not read. No run writes such lines, and skipping more would slow down every
request."""
DAMAGED = b"{"
"""Placeholder for a line that is too long; invalid JSON, so that readers count it as damaged."""


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
        self._skipped_bytes = 0
        """Bytes read of a line that is too long."""

    def read(self, max_bytes: int = CHUNK_BYTES) -> list[bytes]:
        """Return the next complete lines without their ends; empty if nothing is new or there is no file. Lines may be empty."""
        try:
            with self.path.open("rb") as file:
                self._notice_restart(file)
                if self._skipped_bytes >= MAX_LINE_BYTES:
                    return []
                file.seek(self.offset)
                data = file.read(max_bytes)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == max_bytes:
            # Skip a part of a line that is longer than a chunk: no run writes such lines, and reading them would take all memory.
            self.offset += len(data)
            self._last_byte = data[-64:]
            self._skipped_bytes += len(data)
            return [b""]
        self.offset += end
        if not end:
            return []
        self._last_byte = data[max(0, end - 64) : end]
        lines = data[: end - 1].split(b"\n")
        if self._skipped_bytes:  # the first is the end of a line that was too long
            self._skipped_bytes = 0
            lines[0] = DAMAGED
        return lines

    @property
    def size_bytes(self) -> int:
        """Current size of the file; 0 if there is no file."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _notice_restart(self, file: BufferedReader) -> None:
        """Detect that the file was truncated or replaced, even if it has grown again: the bytes before the offset have then changed."""
        state = os.fstat(file.fileno())
        file.seek(max(0, self.offset - len(self._last_byte)))
        same = state.st_ino == self._identity or self._identity is None
        if not same or state.st_size < self.offset or file.read(len(self._last_byte)) != self._last_byte:
            self.generation += 1
            self.offset, self._last_byte, self._skipped_bytes = 0, b"", 0
        self._identity = state.st_ino


class LineReader(ABC):
    """Reader of what the lines of a growing file say; it starts again when the file was truncated or replaced."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._generation = 0
        self._reset()

    @property
    def generation(self) -> int:
        """Counter, incremented when lines were removed because the run resumed from an earlier step."""
        return self._generation

    def update(self, max_chunks: int = MAX_CHUNKS) -> bool:
        """Read the lines that were added, at most `max_chunks` chunks (4 MiB each); return whether there were any."""
        anything = False
        for _ in range(max_chunks):
            lines = self._tail.read()
            if self._tail.generation != self._generation:
                self._generation = self._tail.generation
                self._reset()
            if not lines:
                break
            anything = True
            for line in lines:
                self._add(line)
        return anything

    @abstractmethod
    def _reset(self) -> None:
        """Forget all lines."""

    @abstractmethod
    def _add(self, line: bytes) -> None: ...
