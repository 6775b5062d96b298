"""Directories that no other user of the machine can enter or replace, such as those for weights that are sent to engines."""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fuligo.errors import WeightSyncError
from fuligo.formats.disk import free_space


@contextmanager
def private_directory(prefix: str, root: Path | None = None) -> Iterator[Path]:
    """Yield a new directory under `root` (default: the temporary directory) that no other user can enter, and delete it at the end.

    This process holds a lock on it that ends with the process, so directories that a killed process left behind are recognized and deleted
    first. What other users have put under `root` is neither followed nor waited for. Raises OSError if `root` cannot be written.
    """
    root = root or Path(tempfile.gettempdir())
    for abandoned in root.glob(f"{prefix}*"):
        _remove_unlocked(abandoned)
    directory, lock = _new_locked(root, prefix)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def kept_directory(place: Path, prefix: str) -> Path:
    """Create a permanent directory for this user only, and return it with links resolved.

    If another user could change or replace it, now or later, or it cannot be created, return a temporary directory instead, which lasts
    as long as this process.
    """
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = place.resolve(strict=True)
        if _is_out_of_reach(place) and os.access(place, os.W_OK):
            return place
    except (OSError, RuntimeError):  # no such place, or a loop of links
        pass
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(private_directory(prefix))


def kernel_cache() -> Path:
    """Return a directory for compiled kernels that only this user can write, kept between runs where the user has a home.

    torch's default directory has a known name in /tmp, where another user could create it first and plant code that this process would run.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        cache = Path(os.devnull)
    return kept_directory(cache / "fuligo" / "kernels", "fuligo-kernels-")


def _is_out_of_reach(directory: Path) -> bool:
    """Return whether, by the owners and modes on its path, only this user and root can change or replace a directory."""
    if directory.stat().st_uid != os.geteuid():
        return False
    for place in (*reversed(directory.parents), directory):
        status = place.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return True  # no other user can enter anything below
        writable = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or writable:
            return False
    return not directory.stat().st_mode & 0o022


def _new_locked(root: Path, prefix: str) -> tuple[Path, int | None]:
    """Make a directory and lock it; return the descriptor that holds the lock, None on a file system without locks."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=root))  # with mode 0700
        try:
            lock = _lock(directory)
        except (FileNotFoundError, BlockingIOError):
            continue  # another process of this user is deleting it as abandoned, since it was not locked yet
        except OSError:  # no locks on directories, as on NFS, where nothing is deleted as abandoned
            return directory, None
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

    Raises OSError if it is in use or gone, belongs to another user, or is not a directory: anybody may put links and pipes there.
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


PREFIX = "fuligo-weights-"
_MEMORY = Path("/dev/shm")


def scratch_root() -> Path:
    """Return the memory file system if there is one, else the system's temporary directory."""
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """Yield a new directory under `root` that no other user can enter, and delete it at the end, with those that killed processes left.

    Raises WeightSyncError if `root` cannot be written.
    """
    with ExitStack() as stack:
        with filling(root):
            directory = stack.enter_context(private_directory(PREFIX, root))
        yield directory


@contextmanager
def filling(directory: Path) -> Iterator[None]:
    """Turn an OSError of the block into an error that names `directory` and the free space.

    Raises WeightSyncError if the block could not write to `directory`.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"cannot write weights for the engines to {directory}: {error} ({free_space(directory)}); free some space or use another "
            "--update-weight-transport, then resume from the last checkpoint"
        ) from error
