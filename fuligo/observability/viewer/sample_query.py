"""Search for samples: filters and orders on the index; text is searched file by file, for a bounded time per call."""

import functools
import operator
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from fuligo.observability.viewer.sample_index import SampleIndex
from fuligo.observability.viewer.sample_rows import UNREADABLE, check_size

Order = Literal[
    "newest", "oldest", "reward", "-reward", "length", "-length", "advantage", "-advantage", "staleness", "-staleness", "engine", "-engine"
]
MAX_FOUND = 5000
"""Number of samples found after which a search for text ends."""


class SampleFilter(BaseModel):
    """Filters by column of the index: `NAME_min` and `NAME_max` are inclusive bounds, `NAME` is an exact value. None: no filter."""

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
    status: str | None = None
    kept: bool | None = None
    group: int | None = None
    prompt: int | None = None
    dataset: str | None = None
    part: str | None = None
    """Name of a part of the reward that the sample has."""
    part_min: float | None = None
    part_max: float | None = None
    """Bounds of that part."""
    text: str = Field("", max_length=500)
    """Text to find in the prompt or the response, ignoring case."""


def matching(table: pa.Table, wanted: SampleFilter) -> pa.Table:
    """Return the rows of the index that pass all filters except the text."""
    names = [name for name in SampleFilter.model_fields if name not in ("text", "part", "part_min", "part_max")]
    given = {name: value for name in names if (value := getattr(wanted, name)) not in (None, "")}
    conditions = [_condition(name, value) for name, value in given.items()]
    found = table.filter(functools.reduce(operator.and_, conditions)) if conditions else table
    return _with_part(found, wanted) if wanted.part else found


def _with_part(table: pa.Table, wanted: SampleFilter) -> pa.Table:
    """Return the rows whose reward has the part, within its bounds."""
    values = pc.call_function("map_lookup", [table["parts"]], pc.MapLookupOptions(pa.scalar(wanted.part), "first"))
    table = table.append_column("part", values)
    bounds = {name: bound for name in ("part_min", "part_max") if (bound := getattr(wanted, name)) is not None}
    conditions = [pc.field("part").is_valid(), *(_condition(name, bound) for name, bound in bounds.items())]
    return table.filter(functools.reduce(operator.and_, conditions)).drop_columns(["part"])


def _condition(name: str, value: Any) -> pc.Expression:
    column, _, bound = name.partition("_")
    compare = {"min": operator.ge, "max": operator.le}.get(bound, operator.eq)
    return compare(pc.field(column), value)


def in_order(table: pa.Table, order: Order, offset: int, limit: int) -> pa.Table:
    """Return rows `offset` to `offset + limit` of the index, sorted by `order`.

    Rows with equal values follow each other by step, newest first, then by row. Rows without a value come last.
    """
    by_step = ("step", "ascending" if order == "oldest" else "descending"), ("row", "ascending")
    direction = "descending" if order.startswith("-") else "ascending"
    first = () if order in ("newest", "oldest") else ((order.removeprefix("-"), direction),)
    most = min(offset + limit, table.num_rows)
    if not most:
        return table.slice(0, 0)
    positions = pc.call_function("select_k_unstable", [table], pc.SelectKOptions(most, [*first, *by_step]))
    return table.take(positions.slice(offset))


class TextSearch:
    """Search for one text in the files of a run. Results are kept, so that only new and changed files are searched again."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._hits: dict[int, tuple[tuple[int, int] | None, np.ndarray]] = {}
        """Version of the file that was searched (None: it was missing) and the rows with the text, by step."""

    def advance(self, index: SampleIndex, table: pa.Table, budget_s: float) -> tuple[pa.Table, float]:
        """Search the files of the rows in `table`, newest first: at least one file, then further ones until `budget_s` is used up.

        Returns:
            The rows of `table` found so far, and the share of the files that has been searched: 1.0 also after `MAX_FOUND` rows.
        """
        end = time.monotonic() + budget_s
        steps, rows = table["step"].to_numpy(), table["row"].to_numpy()
        wanted = np.unique(steps)[::-1].tolist()
        found = np.zeros(len(steps), bool)
        num_known = num_searched = 0
        for step in wanted:
            path, version = index.file(step), index.file_version(step)
            if step not in self._hits or self._hits[step][0] != version:
                if found.sum() >= MAX_FOUND or (time.monotonic() > end and num_searched):
                    break
                self._hits[step] = (version, rows_with_text(path, self._text) if path is not None else np.empty(0, np.int64))
                num_searched += 1
            num_known += 1
            here = slice(*np.searchsorted(steps, [step, step + 1]))
            found[here] = np.isin(rows[here], self._hits[step][1])
        share = 1.0 if found.sum() >= MAX_FOUND or not wanted else num_known / len(wanted)
        return table.filter(pa.array(found)), share


def rows_with_text(path: Path, text: str) -> np.ndarray:
    """Return the rows of a file whose prompt or response contains the text; none for a file that cannot be read."""
    # Chat messages are stored as JSON, which escapes quotation marks and line ends.
    escaped = orjson.dumps(text).decode()[1:-1]
    needles = {("prompt", text), ("prompt", escaped), ("response", text)}
    hits = [pc.match_substring(pc.field(column), needle, ignore_case=True) for column, needle in needles]  # pyrefly: ignore[missing-attribute]
    try:
        check_size(pq.read_metadata(path), {column for column, _ in needles})
        table = ds.dataset(path, format="parquet").to_table(columns={"hit": functools.reduce(operator.or_, hits)}, use_threads=False)
    except UNREADABLE:
        return np.empty(0, np.int64)
    return np.flatnonzero(table["hit"].fill_null(False).to_numpy())
