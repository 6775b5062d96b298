"""What the scripts in `tools/` share: they print the plan of a conversion, and say that it cannot be done yet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

from fuligo.errors import FuligoError

NOT_BUILT = (
    "the conversion itself is not built yet, nothing was written (--plan ends after the plan). "
    "Where a distributed checkpoint is asked for, --ref-load and --load take the Hugging Face directory as it is"
)


def run(lines: Callable[[], Iterable[str]], plan_only: bool) -> NoReturn:
    """Print the plan on the first process; the exit code: 0 after `--plan`, 1 because nothing is converted, 2 after bad input."""
    from fuligo.cli.console import show_error

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        for line in lines():
            if is_first:
                print(line)
        if not plan_only:
            raise FuligoError(NOT_BUILT)
    except FuligoError as error:
        if is_first:
            show_error(error)
        sys.exit(error.exit_code)
    sys.exit(0)


def world_size() -> int:
    """Processes that torchrun started, else 1; also where `WORLD_SIZE` is no number of processes."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() and int(given) else 1
