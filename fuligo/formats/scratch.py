"""Directories for weights on their way to engines that read files: in memory where there is a memory file system."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fuligo.errors import WeightSyncError
from fuligo.formats.disk import room

PREFIX = "fuligo-weights-"
_MEMORY = Path("/dev/shm")


def scratch_root() -> Path:
    """A memory file system where there is one, else the system's temporary directory."""
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """A new directory under `root`, gone at the end.

    Whoever uses one holds its lock, which ends with the process. What a killed process left behind is memory that nobody else gives back:
    it is removed first.
    """
    for abandoned in root.glob(f"{PREFIX}*"):
        _remove_unlocked(abandoned)
    unlocked = Path(tempfile.mkdtemp(prefix="new-", dir=root))
    lock = os.open(unlocked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory = unlocked.rename(root / f"{PREFIX}{unlocked.name}")  # it never has this name without its lock
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextmanager
def filling(directory: Path) -> Iterator[None]:
    """
    Raises:
        WeightSyncError: the block could not write there.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"weights cannot be written to {directory}, where engines would read them: {error} ({room(directory)}). Make room there, or "
            "give another --update-weight-transport; resume from the last checkpoint."
        ) from error


def _remove_unlocked(directory: Path) -> None:
    with suppress(OSError):  # another user's, gone by now, or in use
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(lock)
