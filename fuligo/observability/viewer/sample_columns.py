"""One line per sample for finding it: a few numbers, no text, no tokens.

Runs write these numbers as columns of their own; of files of earlier versions they are made from the lists of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuligo.observability.samples import VERSIONS_IN_FOOTER, prompt_key
from fuligo.observability.viewer.sample_footer import Footer

STATUSES = ("completed", "truncated", "aborted", "failed", "pending")
"""By their code in `SampleColumns.status`; `UNKNOWN_STATUS` for any other word."""
UNKNOWN_STATUS = 255
_PLAIN = ("index", "group_index", "reward", "status", "kept", "dataset")
_MADE_FROM = {
    "engine": (),
    "response_length": ("loss_mask", "versions"),
    "advantage_mean": ("advantages",),
    "oldest_version": ("versions",),
    "prompt_key": ("prompt",),
}
"""Columns of a file, and those that they are made from where it lacks them."""


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """[N] each. What a file lacks is NaN, or -1."""

    step: np.ndarray
    row: np.ndarray
    """In the file of its step."""
    index: np.ndarray
    group: np.ndarray
    reward: np.ndarray
    length: np.ndarray
    """Response tokens."""
    advantage: np.ndarray
    """Mean over the response."""
    staleness: np.ndarray
    """Versions between the oldest token and the newest token of the step's samples."""
    engine: np.ndarray
    """That sampled the last tokens."""
    status: np.ndarray
    kept: np.ndarray
    prompt: np.ndarray
    """Key of the prompt's text."""
    dataset: np.ndarray
    """Key of the data set's name, in evaluations."""

    def __len__(self) -> int:
        return len(self.step)

    def take(self, rows: np.ndarray) -> SampleColumns:
        return SampleColumns(*(getattr(self, field.name)[rows] for field in fields(self)))


def joined(parts: list[SampleColumns]) -> SampleColumns:
    return SampleColumns(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(SampleColumns)))


def no_samples() -> SampleColumns:
    return columns_of(pa.table({}), 0)


def read_sample_columns(path: Path, step: int) -> SampleColumns:
    """Columns of which the footer says that all rows are alike are not read.

    Raises:
        OSError, pa.ArrowException: it is no parquet file, or a damaged one.
    """
    with pq.ParquetFile(path) as file:
        footer = Footer(file.metadata)
        constants = {name: value for name in _PLAIN + tuple(_MADE_FROM) if (value := footer.constant(name)) is not None}
        table = file.read([name for name in _wanted(set(file.schema_arrow.names)) if name not in constants], use_threads=False)
    num = file.metadata.num_rows
    for name, value in constants.items():
        table = table.append_column(name, pa.repeat(value, num)) if table.num_columns else pa.table({name: pa.repeat(value, num)})
    return columns_of(table, step, newest=footer.greatest(VERSIONS_IN_FOOTER))


def _wanted(present: set[str]) -> list[str]:
    names = [name for name in _PLAIN if name in present]
    for name, sources in _MADE_FROM.items():
        names += [name] if name in present else [source for source in sources if source in present]
    return list(dict.fromkeys(names))


def columns_of(table: pa.Table, step: int, newest: int | None = None) -> SampleColumns:
    """Of the columns that the table has.

    Args:
        newest: version of any token, where it is known already
    """
    num = table.num_rows
    oldest = _oldest_versions(table, num)
    newest = max(_newest_version(table) if newest is None else newest, int(oldest.max(initial=-1)))
    return SampleColumns(
        step=np.full(num, step, np.int32),
        row=np.arange(num, dtype=np.int32),
        index=_integers(table, "index", num),
        group=_integers(table, "group_index", num),
        reward=_floats(table, "reward", num),
        length=_lengths(table, num).astype(np.int32),
        advantage=_floats(table, "advantage_mean", num) if "advantage_mean" in table.schema.names else _means(table, "advantages", num),
        staleness=np.where(oldest >= 0, newest - oldest, -1).astype(np.int16),
        engine=_integers(table, "engine", num).astype(np.int16),
        status=_statuses(table, num),
        kept=np.asarray(table["kept"].fill_null(True).to_numpy(), bool) if "kept" in table.schema.names else np.ones(num, bool),
        prompt=_integers(table, "prompt_key", num) if "prompt_key" in table.schema.names else _keys(table, "prompt", num),
        dataset=_keys(table, "dataset", num),
    )


def _integers(table: pa.Table, name: str, num: int) -> np.ndarray:
    if name not in table.schema.names:
        return np.full(num, -1, np.int64)
    return table[name].fill_null(-1).to_numpy().astype(np.int64)


def _floats(table: pa.Table, name: str, num: int) -> np.ndarray:
    if name not in table.schema.names:
        return np.full(num, np.nan, np.float32)
    return table[name].cast(pa.float64()).fill_null(np.nan).to_numpy().astype(np.float32)


def _list_column(table: pa.Table, name: str) -> pa.ListArray | None:
    if name not in table.schema.names:
        return None
    column = table[name].combine_chunks()
    return column if pa.types.is_list(column.type) else None


def _counts(column: pa.ListArray) -> np.ndarray:
    """Entries of each list; 0 of null."""
    return column.value_lengths().fill_null(0).to_numpy()


def _lengths(table: pa.Table, num: int) -> np.ndarray:
    if "response_length" in table.schema.names:
        return _integers(table, "response_length", num)
    for name in ("loss_mask", "versions"):
        column = _list_column(table, name)
        if column is not None:
            return _counts(column)
    return np.zeros(num, np.int32)


def _oldest_versions(table: pa.Table, num: int) -> np.ndarray:
    """[N] -1 without tokens."""
    column = _list_column(table, "versions")
    if "oldest_version" in table.schema.names or column is None:
        return _integers(table, "oldest_version", num)
    counts = _counts(column)
    oldest = np.full(num, -1, np.int64)
    filled = counts > 0
    if filled.any():
        oldest[filled] = np.minimum.reduceat(column.flatten().to_numpy(), (np.cumsum(counts) - counts)[filled])
    return oldest


def _newest_version(table: pa.Table) -> int:
    column = _list_column(table, "versions")
    return int(column.flatten().to_numpy().max()) if column is not None and len(column.flatten()) else -1


def _means(table: pa.Table, name: str, num: int) -> np.ndarray:
    means = np.full(num, np.nan, np.float32)
    column = _list_column(table, name)
    if column is None:
        return means
    values = column.flatten().to_numpy().astype(np.float64)
    counts = _counts(column)
    filled = counts > 0
    if filled.any():
        means[filled] = np.add.reduceat(values, (np.cumsum(counts) - counts)[filled]) / counts[filled]
    return means


def _statuses(table: pa.Table, num: int) -> np.ndarray:
    codes = np.full(num, UNKNOWN_STATUS, np.uint8)
    if "status" not in table.schema.names:
        return codes
    words, per_row = _dictionary(table["status"])
    code_of_word = np.array([STATUSES.index(word) if word in STATUSES else UNKNOWN_STATUS for word in words] or [0], np.uint8)
    return np.where(per_row >= 0, code_of_word[per_row], UNKNOWN_STATUS).astype(np.uint8)


def _keys(table: pa.Table, name: str, num: int) -> np.ndarray:
    if name not in table.schema.names:
        return np.full(num, -1, np.int64)
    texts, per_row = _dictionary(table[name])
    keys = np.array([prompt_key(text) for text in texts] or [-1], np.int64)
    return np.where(per_row >= 0, keys[per_row], -1)


def _dictionary(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """The different texts, and each row's among them; -1 for null."""
    encoded = column.combine_chunks() if pa.types.is_dictionary(column.type) else column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):  # dictionaries of row groups that differ
        encoded = encoded.unify_dictionaries().combine_chunks()
    return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
