"""The files that a script sees: those of its own folder, read only, and those that it "writes", which exist in memory alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fuligo.importer.limits import MAX_FILE_BYTES

NULL = "/dev/null"


class FileRefusedError(Exception):
    """A file that the script may not read, or that is not there; the text says why."""


@dataclass(slots=True)
class ScriptFiles:
    """Virtual files over a folder that is never written."""

    root: Path
    """Resolved; only what lies under it is read."""
    further: tuple[Path, ...] = ()
    """Resolved files outside that the caller named: the host file."""
    written: dict[str, str] = field(default_factory=dict)
    """Absolute path -> text."""

    def is_known(self, path: str) -> bool:
        """Whether it can be said at all if the file exists: it is in memory, or lies where reading is allowed."""
        return path in self.written or path == NULL or self._allowed(path) is not None

    def exists(self, path: str, directory: bool) -> bool:
        """Among the known ones."""
        if path in self.written or path == NULL:
            return not directory
        allowed = self._allowed(path)
        return allowed is not None and (allowed.is_dir() if directory else allowed.is_file())

    def read(self, path: str) -> str:
        """Text of a file.

        Raises:
            FileRefusedError: outside the folder, missing, too large, or not text.
        """
        if path == NULL:
            return ""
        if path in self.written:
            return self.written[path]
        allowed = self._allowed(path)
        if allowed is None:
            raise FileRefusedError(f"{path} lies outside of {self.root}, nothing else is read (--root DIR sets another folder)")
        if not allowed.is_file():
            raise FileRefusedError(f"there is no file {path}")
        if allowed.stat().st_size > MAX_FILE_BYTES:
            raise FileRefusedError(f"{path} has more than {MAX_FILE_BYTES:,} bytes")
        try:
            return allowed.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FileRefusedError(f"{path} cannot be read: {error}") from None

    def write(self, path: str, text: str, append: bool) -> None:
        """In memory."""
        if path != NULL:
            self.written[path] = (self.written.get(path, "") if append else "") + text

    def temporary(self, template: str | None) -> str:
        """The name of a new, empty file, as mktemp gives it."""
        number = f"{len(self.written):06d}"
        head, marks, tail = (template or "/tmp/tmp.XXXXXX").rpartition("XXX")
        path = head.rstrip("X") + number + tail if marks else f"{template}.{number}"
        self.written[path] = ""
        return path

    def _allowed(self, path: str) -> Path | None:
        try:
            resolved = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):
            return None
        inside = resolved.is_relative_to(self.root) or resolved in self.further
        return resolved if inside else None
