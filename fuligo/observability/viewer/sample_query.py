"""Finding samples: filters and orders over the index; text is searched file by file, for a bounded time a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fuligo.observability.viewer.sample_columns import STATUSES, SampleColumns

Order = Literal["newest", "oldest", "reward", "-reward", "length", "-length", "advantage", "-advantage", "staleness", "-staleness"]
MAX_FOUND = 5000
"""Samples that a search for text collects."""


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """None and empty: not asked for. Bounds are inclusive."""

    step_min: int | None = None
    step_max: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: int | None = None
    length_max: int | None = None
    advantage_min: float | None = None
    advantage_max: float | None = None
    staleness_min: int | None = None
    status: str | None = None
    kept: bool | None = None
    group: int | None = None
    prompt: int | None = None
    """Hash of the prompt's text."""
    text: str = ""
    """In prompt or response, in any case of letters."""


def matching(columns: SampleColumns, wanted: SampleFilter) -> np.ndarray:
    """Positions in the index that fit all but the text."""
    mask = np.ones(len(columns), bool)
    for values, least, most in (
        (columns.step, wanted.step_min, wanted.step_max),
        (columns.reward, wanted.reward_min, wanted.reward_max),
        (columns.length, wanted.length_min, wanted.length_max),
        (columns.advantage, wanted.advantage_min, wanted.advantage_max),
        (columns.staleness, wanted.staleness_min, None),
    ):
        if least is not None:
            mask &= values >= least
        if most is not None:
            mask &= values <= most
    for values, value in ((columns.kept, wanted.kept), (columns.group, wanted.group), (columns.prompt, wanted.prompt)):
        if value is not None:
            mask &= values == value
    if wanted.status is not None:
        mask &= columns.status == (STATUSES.index(wanted.status) if wanted.status in STATUSES else -1)
    return np.flatnonzero(mask)


def ordered(columns: SampleColumns, positions: np.ndarray, order: Order) -> np.ndarray:
    """Newest steps first; within a step, and where values are equal, as in its file. What has no value comes last."""
    newest = np.lexsort((columns.row[positions], -columns.step[positions]))
    if order == "oldest":
        return positions
    if order == "newest":
        return positions[newest]
    positions = positions[newest]
    values = getattr(columns, order.removeprefix("-"))[positions].astype(np.float64)
    return positions[np.argsort(-values if order.startswith("-") else values, kind="stable")]


class TextSearch:
    """One search through the files of a run, newest first, that goes on where it stopped."""

    def __init__(self, columns: SampleColumns, positions: np.ndarray, text: str, file_of: Callable[[int], Path | None]) -> None:
        self._columns = columns
        self._text = text
        self._file_of = file_of
        steps = columns.step[positions]
        self._pending = [(int(step), positions[steps == step]) for step in np.unique(steps)] if len(positions) else []
        self._num_steps = len(self._pending)
        self.found: list[int] = []
        """Positions in the index."""

    @property
    def done(self) -> bool:
        return not self._pending or len(self.found) >= MAX_FOUND

    @property
    def share_done(self) -> float:
        return 1.0 if self.done else 1 - len(self._pending) / self._num_steps

    def go_on(self, budget_s: float) -> None:
        """Search at least one file."""
        end = time.monotonic() + budget_s
        while not self.done:
            step, positions = self._pending.pop()
            path = self._file_of(step)
            if path is not None:
                rows = rows_with_text(path, self._text)
                self.found += positions[np.isin(self._columns.row[positions], rows)].tolist()
            if time.monotonic() > end:
                break


def rows_with_text(path: Path, text: str) -> np.ndarray:
    """Rows of a file whose prompt or response holds the text; none of a file that cannot be read."""
    try:
        with pq.ParquetFile(path, read_dictionary=["prompt", "response"]) as file:
            table = file.read(["prompt", "response"], use_threads=False)
    except (OSError, pa.ArrowException, KeyError):
        return np.empty(0, np.int64)
    # Chat messages are stored as JSON: a quotation mark or a line end in the text stands escaped there.
    escaped = orjson.dumps(text).decode()[1:-1]
    hit = np.zeros(table.num_rows, bool)
    for column, needle in (("prompt", text), ("prompt", escaped), ("response", text)):
        hit |= _holds(table[column], needle)
    return np.flatnonzero(hit)


def _holds(column: pa.ChunkedArray, text: str) -> np.ndarray:
    options = pc.MatchSubstringOptions(text, ignore_case=True)
    parts = []
    for chunk in column.chunks:
        words = pc.call_function("match_substring", [chunk.dictionary], options).fill_null(False).to_numpy(zero_copy_only=False)
        codes = chunk.indices.fill_null(-1).to_numpy()
        parts.append(np.append(words, False)[codes])  # -1 is the last
    return np.concatenate(parts) if parts else np.empty(0, bool)
