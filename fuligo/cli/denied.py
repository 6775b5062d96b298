"""Explanation of paths that the operating system refuses to open."""

import errno
import os
import pwd
import stat
from collections.abc import Sequence
from pathlib import Path

_ERRNOS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


def denied(error: OSError, arguments: Sequence[str]) -> str | None:
    """Explain why a path cannot be used: the flag that gave it, the directory that denies access, and the fix; None for other errors.

    Args:
        arguments: command line, in which the flag is looked up.
    """
    if error.errno not in _ERRNOS or not isinstance(error.filename, str | bytes):
        return None
    path = Path(os.fsdecode(error.filename)).absolute()
    return f"cannot use {_flag_of(path, arguments)}{path}: {error.strerror}{_barrier(path)}; use a path that {_name(os.geteuid())} can use"


def _flag_of(path: Path, arguments: Sequence[str]) -> str:
    """Return the flag whose value contains the path or is inside it; empty if there is none."""
    flag = ""
    for argument in arguments:
        value = argument
        if argument.startswith("--"):
            flag, _, value = argument.partition("=")
        given = Path(value).absolute()
        if value and flag and (path.is_relative_to(given) or given.is_relative_to(path)):
            return f"{flag} "
    return ""


def _barrier(path: Path) -> str:
    """Describe the directory that this user may not enter: ` (/data is drwx------, owned by root)`; empty if there is none."""
    for directory in [*reversed(path.parents), path]:
        if not os.access(directory, os.X_OK):
            try:
                found = directory.lstat()
            except OSError:
                return ""
            return f" ({directory} is {stat.filemode(found.st_mode)}, owned by {_name(found.st_uid)})"
    return ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
