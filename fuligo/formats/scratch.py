"""Scratch directories for weights that engines read from files, in memory if there is a memory file system."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fuligo.errors import WeightSyncError
from fuligo.formats.disk import free_space
from fuligo.formats.private import private_directory

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
