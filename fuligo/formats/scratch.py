"""Scratch directories for weights that engines read from files, in memory if there is a memory file system."""

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
from fuligo.formats.disk import free_space

PREFIX = "fuligo-weights-"
_MEMORY = Path("/dev/shm")


def scratch_root() -> Path:
    """Return the memory file system if there is one, else the system's temporary directory."""
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """Yield a new directory under `root` and delete it at the end.

    Its user holds a lock on it that ends with the process, so directories that a killed process left behind are recognised and deleted
    first.
    """
    for abandoned in root.glob(f"{PREFIX}*"):
        _remove_unlocked(abandoned)
    unlocked = Path(tempfile.mkdtemp(prefix="new-", dir=root))
    lock = os.open(unlocked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory = unlocked.rename(root / f"{PREFIX}{unlocked.name}")  # The final name exists only while the lock is held.
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextmanager
def filling(directory: Path) -> Iterator[None]:
    """Turn an OSError of the block into an error that names `directory` and the free space.

    Raises:
        WeightSyncError: the block could not write to `directory`.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"cannot write weights for the engines to {directory}: {error} ({free_space(directory)}); free some space or use another "
            "--update-weight-transport, then resume from the last checkpoint"
        ) from error


def _remove_unlocked(directory: Path) -> None:
    with suppress(OSError):  # It belongs to another user, is already gone, or is in use.
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(lock)
