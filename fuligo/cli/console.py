"""Errors and warnings on stderr."""

import sys

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
