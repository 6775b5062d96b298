"""Errors and warnings on stderr, and the explanation of paths that the operating system refuses to open."""

import errno
import os
import pwd
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fuligo.config.secret import hide_credentials
from fuligo.errors import ConfigError, FuligoError


def show_error(error: FuligoError) -> None:
    """Print an error without its traceback; several problems become a list."""
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    _print("error", "bold red", problems[0] if len(problems) == 1 else f"{len(problems)} problems")
    if len(problems) > 1:
        for problem in problems:
            _print("  -", "red", problem)


def show_warning(text: str) -> None:
    """Print a warning on one line."""
    _print("warning", "bold yellow", text)


def show_choice(text: str) -> None:
    """Print a value that was chosen for a flag, and why, on one line."""
    _print("chosen", "bold green", text)


def _print(label: str, style: str, text: str) -> None:
    # A script or file must not send escape sequences to the terminal.
    text = hide_credentials(text)
    text = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    # soft_wrap keeps paths and commands on one line.
    separator = " " if label.endswith("-") else ": "
    Console(file=sys.stderr, soft_wrap=True).print(Text.assemble((label, style), separator, text))


_ERRNOS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


def denied(error: OSError, arguments: Sequence[str]) -> str | None:
    """Explain why a path cannot be used: the flag that gave it, the directory that denies access, and the fix; None for other errors."""
    if error.errno not in _ERRNOS or not isinstance(error.filename, str | bytes):
        return None
    path = Path(os.fsdecode(error.filename)).absolute()
    return f"cannot use {_flag_of(path, arguments)}{path}: {error.strerror}{_barrier(path)}; use a path that {_name(os.geteuid())} can use"


def _flag_of(path: Path, arguments: Sequence[str]) -> str:
    """Return `FLAG ` for the flag whose value is the path, or a path above or below it; empty if there is none."""
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
