"""Finding samples: filters and orders over the index; text is searched file by file, for a bounded time a call."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fuligo.observability.samples import prompt_key
from fuligo.observability.viewer.sample_columns import STATUSES, SampleColumns
from fuligo.observability.viewer.sample_index import SampleIndex

Order = Literal[
    "newest", "oldest", "reward", "-reward", "length", "-length", "advantage", "-advantage", "staleness", "-staleness", "engine", "-engine"
]
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
    engine: int | None = None
    """-1: nobody knows which."""
    status: str | None = None
    kept: bool | None = None
    group: int | None = None
    prompt: int | None = None
    """Key of the prompt's text."""
    dataset: str = ""
    """Name, of an evaluation."""
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
    for values, value in (
        (columns.kept, wanted.kept),
        (columns.group, wanted.group),
        (columns.prompt, wanted.prompt),
        (columns.engine, wanted.engine),
        (columns.dataset, prompt_key(wanted.dataset) if wanted.dataset else None),
    ):
        if value is not None:
            mask &= values == value
    if wanted.status is not None:
        mask &= columns.status == (STATUSES.index(wanted.status) if wanted.status in STATUSES else -1)
    return np.flatnonzero(mask)


def ordered(columns: SampleColumns, positions: np.ndarray, order: Order) -> np.ndarray:
    """Newest steps first; within a step, and where values are equal, as in its file. What has no value comes last."""
    newest = np.argsort(-columns.step[positions], kind="stable")  # the index is in the order of steps and rows
    if order == "oldest":
        return positions
    if order == "newest":
        return positions[newest]
    positions = positions[newest]
    values = getattr(columns, order.removeprefix("-"))[positions].astype(np.float64)
    return positions[np.argsort(-values if order.startswith("-") else values, kind="stable")]


@dataclass(slots=True, frozen=True)
class Hits:
    """Rows of one file that hold the text."""

    version: tuple[int, int] | None
    """Of the file."""
    rows: np.ndarray


class TextSearch:
    """One text, looked for in the files of a run. What is known of a file stays known: a new step is searched, no old one again."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._hits: dict[int, Hits] = {}
        """By step."""

    def go_on(self, index: SampleIndex, columns: SampleColumns, positions: np.ndarray, budget_s: float) -> tuple[np.ndarray, float]:
        """Search one file at least, newest first, of those that hold `positions`.

        Returns:
            Those of `positions` that hold the text, as far as is known, and the share of their files that is.
        """
        end = time.monotonic() + budget_s
        wanted = np.unique(columns.step[positions])[::-1].tolist()
        starts = np.searchsorted(columns.step, wanted).tolist()
        is_wanted = np.zeros(len(columns), bool)
        is_wanted[positions] = True
        found: list[np.ndarray] = []
        num_found = num_searched = 0
        for step, start in zip(wanted, starts, strict=True):
            hits = self._known(index, step)
            if hits is None and num_found < MAX_FOUND and (time.monotonic() <= end or not num_searched):
                hits = self._search(index, step)
                num_searched += 1
            if hits is None:
                break
            at = start + hits.rows
            at = at[at < len(columns)]
            found.append(at[is_wanted[at] & (columns.step[at] == step)])
            num_found += len(found[-1])
        share = 1.0 if num_found >= MAX_FOUND or not wanted else len(found) / len(wanted)
        return np.concatenate(found) if found else np.empty(0, np.int64), share

    def _known(self, index: SampleIndex, step: int) -> Hits | None:
        hits = self._hits.get(step)
        return hits if hits is not None and hits.version == index.file_version(step) else None

    def _search(self, index: SampleIndex, step: int) -> Hits:
        path, version = index.file(step), index.file_version(step)
        rows = rows_with_text(path, self._text) if path is not None else np.empty(0, np.int64)
        hits = self._hits[step] = Hits(version, rows)
        return hits


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
