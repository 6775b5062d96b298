"""Checks of prompt files before a run, without a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from fuligo.config.groups import DataFlags
from fuligo.data.dataset import Rows
from fuligo.data.source import PromptOrder

ROWS_READ = 20_000
"""Number of rows of the data among which all that a run draws are read, in about 20 us each."""


def check_file(paths: str | Path | Sequence[str], settings: DataFlags, num_drawn: int | None = None) -> int:
    """Check prompt files (readable, not empty, rows have the keys and valid values) and return how many rows are selected.

    The first rows of every file are read and, of the first `ROWS_READ` rows, those that the run draws. With --skip-bad-rows, none is.

    Args:
        num_drawn: rows that the run draws at least; None: all

    Raises DataError if a file is unusable, naming the file, the line and the fix.
    """
    rows = Rows.open(paths, settings)
    if not settings.skip_bad_rows:
        drawn = set() if settings.image_key is not None else _drawn(rows, settings, num_drawn)  # images are read with their rows
        for row in sorted(drawn.union(rows.first_rows())):  # a columnar file decodes each group of rows once
            rows[row]
    return len(rows)


def _drawn(rows: Rows, settings: DataFlags, num_drawn: int | None) -> set[int]:
    if num_drawn is None:
        return set(range(min(len(rows), ROWS_READ)))
    drawn = PromptOrder.of(rows, settings).epoch_rows()[:num_drawn]
    return set(drawn[drawn < ROWS_READ].tolist())
