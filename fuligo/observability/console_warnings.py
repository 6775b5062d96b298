"""Warnings of the log on the console, without flooding it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

MAX_ALIKE = 3
"""Warnings shown per place in the code; the others are in log.txt only."""


@contextmanager
def warnings_shown_on(console: Console) -> Iterator[None]:
    """Show warnings and errors that fuligo logs, without tracebacks."""
    handler = _ConsoleHandler(console)
    logger = logging.getLogger("fuligo")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._num_alike: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        place = f"{record.name}:{record.lineno}"
        self._num_alike[place] += 1
        if self._num_alike[place] > MAX_ALIKE:
            return
        last = " (further ones are in log.txt)" if self._num_alike[place] == MAX_ALIKE else ""
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        self._console.print(Text.assemble((record.levelname.lower(), style), f": {record.getMessage()}{last}"), soft_wrap=True)
