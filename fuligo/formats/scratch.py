"""Scratch directories for weights that engines read from files, in memory if there is a memory file system."""

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
    """Yield a new directory under `root` that no other user can enter, and delete it at the end.

    Its user holds a lock on it that ends with the process, so directories that a killed process left behind are recognised and deleted
    first. What other users have put under `root` is neither followed nor waited for.

    Raises:
        WeightSyncError: `root` cannot be written.
    """
    for abandoned in root.glob(f"{PREFIX}*"):
        _remove_unlocked(abandoned)
    with filling(root):
        directory, lock = _new_locked(root)
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


def _new_locked(root: Path) -> tuple[Path, int]:
    """Make a directory and lock it; return the descriptor that holds the lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))  # with mode 0700
        with suppress(FileNotFoundError, BlockingIOError):  # another process of this user took it for abandoned before it was locked
            lock = _lock(directory)
            if directory.exists():
                return directory, lock
            os.close(lock)


def _remove_unlocked(directory: Path) -> None:
    with suppress(OSError):  # It is not ours, is already gone, or is in use.
        lock = _lock(directory)
        try:
            shutil.rmtree(directory)
        finally:
            os.close(lock)


def _lock(directory: Path) -> int:
    """Lock a directory of this user; return its descriptor.

    Raises:
        OSError: it is in use or gone, belongs to another user, or is not a directory: anybody may put links and pipes there.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{directory} belongs to another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
