"""Directories that no other user of the machine can enter or replace, for example for weights that are sent to engines."""

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

    Directories with the same prefix that killed processes left behind are deleted first: they are not locked, unlike those in use. This
    clean-up neither follows links that other users planted under `root`, nor blocks on their pipes. Raises OSError if `root` cannot be
    written.
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
    """Create the directory `place` if it does not exist, and return its path with links resolved.

    If it cannot be created or written, or another user could change or replace it, return a temporary directory instead, whose name begins
    with `prefix`, and which is deleted when this process ends.
    """
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = place.resolve(strict=True)
        if _is_out_of_reach(place) and os.access(place, os.W_OK):
            return place
    except (OSError, RuntimeError):  # it cannot be created, or its path has a loop of links
        pass
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(private_directory(prefix))


def kernel_cache() -> Path:
    """Return a directory for compiled kernels that only this user can write; it is kept between runs if the user has a home directory.

    torch's default directory has a known name in /tmp, where another user could create it first and plant code that this process would run.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        cache = Path(os.devnull)
    return kept_directory(cache / "fuligo" / "kernels", "fuligo-kernels-")


def _is_out_of_reach(directory: Path) -> bool:
    """Return whether only this user and root can change or replace a directory, by the owners and modes of all parts of its path."""
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
    """Create and lock a directory; return it with the descriptor that holds the lock, which is None on a file system without locks."""
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

    Raises OSError if the path is in use or gone, belongs to another user, or is not a directory, such as another user's link or pipe.
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


def scratch_root() -> Path:
    """Return /dev/shm if it exists, else the system's temporary directory."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """Yield a new `private_directory` under `root` for weights. Raises WeightSyncError if `root` cannot be written."""
    with ExitStack() as stack:
        with filling(root):
            directory = stack.enter_context(private_directory("fuligo-weights-", root))
        yield directory


@contextmanager
def filling(directory: Path) -> Iterator[None]:
    """Convert an error of writing inside the block to a WeightSyncError that names `directory` and the free space."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"cannot write weights for the engines to {directory}: {error} ({free_space(directory)}); free some space or use another "
            "--update-weight-transport, then resume from the last checkpoint"
        ) from error
