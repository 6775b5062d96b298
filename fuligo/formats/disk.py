"""Writing to a disk that may be full: which file system it is, and how much of it is free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuligo.errors import FuligoError


def room(path: Path) -> str:
    """`0 of 500 MiB are free on the file system /scratch`, the one that has `path`, or would have it."""
    place = path.resolve()
    place = next(parent for parent in (place, *place.parents) if parent.exists())
    usage = shutil.disk_usage(place)
    mount = next(parent for parent in (place, *place.parents) if os.path.ismount(parent))
    return f"{usage.free // 1024**2} of {usage.total // 1024**2} MiB are free on the file system {mount}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """
    Raises:
        FuligoError: the file, or the directory, cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise FuligoError(
            f"{path} cannot be written: {_cause(error)} ({room(path)}). What was recorded before is whole; make room, then resume"
        ) from error


def _cause(error: OSError) -> object:
    """Of the many that copying a tree gathers, the first."""
    if isinstance(error, shutil.Error):
        _, _, why = error.args[0][0]
        return why
    return error.strerror or error
