"""Prompt file, kept open by its descriptor, whose content must not change while a run reads it."""

import hashlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from fuligo.errors import DataChangedError

_CHUNK_BYTES = 8 * 1024**2


class OpenFile:
    """File that is read explicitly, never memory-mapped: if a mapped file shrinks, SIGBUS kills the process.

    Renaming, replacing or deleting the file does not affect this object. A change of content is detected by size and times, which are
    compared after every read. If they differ and the digest is already known, the content decides: `touch`, `chmod` and appending are
    harmless.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError if it cannot be opened."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self._state = self._current_state()
        self.num_bytes = self._state[0]
        """Size in bytes when it was opened."""
        self._digest: str | None = None

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` (at most `num_bytes`). Raises DataChangedError if the content changed or is lost."""
        content = b"".join(self._chunks(start, stop))
        if len(content) < stop - start:
            raise self._changed()
        self.check()
        return content

    def digest(self) -> str:
        """Return the BLAKE2b digest of the content; the first call reads the file. Raises DataChangedError if the content has changed."""
        if self._digest is None:
            digest = self._compute_digest()
            self.check()
            self._digest = digest
        return self._digest

    def check(self) -> None:
        """Raise DataChangedError if the content has changed since the file was opened, or can no longer be read."""
        try:
            state = self._current_state()
        except OSError as error:
            raise self._lost(error) from error
        if state == self._state:
            return
        if self._digest is None or self._compute_digest() != self._digest:
            raise self._changed()
        self._state = state

    def _compute_digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for chunk in self._chunks(0, self.num_bytes):
            digest.update(chunk)
        return digest.hexdigest()

    def _chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `stop` or the end of the file."""
        try:
            while start < stop and (chunk := os.pread(self.descriptor, min(_CHUNK_BYTES, stop - start), start)):
                yield chunk
                start += len(chunk)
        except OSError as error:
            raise self._lost(error) from error

    def _current_state(self) -> tuple[int, int, int]:
        """Return the size in bytes and the times of the last change of content and of attributes, in ns; the latter cannot be set back."""
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _changed(self) -> DataChangedError:
        size = os.fstat(self.descriptor).st_size
        sizes = f"{self.num_bytes:,} bytes before, {size:,} now" if size != self.num_bytes else f"{size:,} bytes as before"
        return DataChangedError(
            f"cannot continue with {self.path}: its content changed while it was read ({sizes}); restore the file and resume from the last "
            "checkpoint, or start a new run. To replace a file that a run reads, write another one and rename it"
        )

    def _lost(self, error: OSError) -> DataChangedError:
        return DataChangedError(f"cannot read {self.path} anymore: {error.strerror}; make it readable and resume from the last checkpoint")
