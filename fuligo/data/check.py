"""Checks of prompt files before a run: of their rows without a tokenizer, and of the lengths of the longest prompts."""

from collections.abc import Sequence
from pathlib import Path

from fuligo.config.groups import DataFlags
from fuligo.data.dataset import PromptDataset, Rows
from fuligo.data.source import PromptOrder
from fuligo.errors import DataError

ROWS_READ = 20_000
"""Number of rows, from the first, of which those that a run draws are read; reading one takes about 20 us."""
PROMPTS_TOKENIZED = 4
"""Number of prompts, those with the most characters, that are tokenized to find the longest one."""


def check_file(paths: str | Path | Sequence[str], settings: DataFlags, num_drawn: int | None = None) -> int:
    """Check prompt files (readable, not empty, rows have the keys and valid values) and return how many rows are selected.

    The first rows of every file are read and, unless rows have images, those of the first `ROWS_READ` rows that are among the first
    `num_drawn` of the first epoch (None: all). With --skip-bad-rows, no rows are read. Raises DataError if a file is unusable, naming the
    file, the line and the fix.
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


def longest_prompt(dataset: PromptDataset, num_drawn: int | None = None) -> tuple[int, int] | None:
    """Return the row and the number of tokens of the longest usable prompt among those of the first `ROWS_READ` rows that the run draws.

    Only the `PROMPTS_TOKENIZED` prompts with the most characters are compared. `num_drawn` is that of `check_file`. Return None if none of
    them can be used, or rows have images.
    """
    if dataset.settings.image_key is not None:
        return None
    num_characters: dict[int, int] = {}
    for row in sorted(_drawn(dataset.rows, dataset.settings, num_drawn)):
        try:
            num_characters[row] = len(str(dataset.rows[row].prompt))
        except DataError:  # reported when the row is drawn
            continue
    num_tokens: dict[int, int] = {}
    for row in sorted(num_characters, key=lambda row: (-num_characters[row], row))[:PROMPTS_TOKENIZED]:
        try:
            num_tokens[row] = len(dataset[row].prompt_ids)
        except DataError:
            continue
    return max(num_tokens.items(), key=lambda item: item[1], default=None)
