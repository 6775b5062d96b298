"""Directory of temporary files."""

import os
import tempfile
from pathlib import Path

ROOM_BYTES = 4096
"""Size of the file that is written as a test: a full file system still creates empty files."""


def temporary_problem() -> str | None:
    """Return why temporary files cannot be written; None if they can.

    Python would silently take another directory for a TMPDIR that it cannot use, in the end the working directory; compilers would fail.
    """
    chosen = os.environ.get("TMPDIR")
    if not chosen:
        try:
            tempfile.gettempdir()
        except FileNotFoundError as error:  # lists the directories that were tried
            return f"cannot write temporary files: {error.strerror}; free space there, or set TMPDIR to a directory that can be written to"
        return None
    try:
        with tempfile.TemporaryFile(dir=Path(chosen).absolute(), buffering=0) as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        cause = error.strerror or str(error)
        return f"cannot use TMPDIR {chosen}: {cause}; create it, free space there, or set TMPDIR to another directory"
    return None
