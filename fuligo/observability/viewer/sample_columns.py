"""One line per sample for finding it: a few numbers, no text, no tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STATUSES = ("completed", "truncated", "aborted", "failed", "pending")
"""By their code in `SampleColumns.status`; `UNKNOWN_STATUS` for any other word."""
UNKNOWN_STATUS = 255
_READ = ["index", "group_index", "prompt", "reward", "status", "kept", "loss_mask", "versions", "advantages"]


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
    status: np.ndarray
    kept: np.ndarray
    prompt: np.ndarray
    """Hash of the prompt's text."""

    def __len__(self) -> int:
        return len(self.step)

    def take(self, rows: np.ndarray) -> SampleColumns:
        return SampleColumns(*(getattr(self, field.name)[rows] for field in fields(self)))


def joined(parts: list[SampleColumns]) -> SampleColumns:
    return SampleColumns(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(SampleColumns)))


def no_samples() -> SampleColumns:
    return columns_of(pa.table({}), 0)


def read_sample_columns(path: Path, step: int) -> SampleColumns:
    """
    Raises:
        OSError, pa.ArrowException: it is no parquet file, or a damaged one.
    """
    try:
        file = pq.ParquetFile(path, read_dictionary=["prompt", "status"])
    except KeyError:  # it has no such columns
        file = pq.ParquetFile(path)
    with file:
        present = set(file.schema_arrow.names)
        return columns_of(file.read([name for name in _READ if name in present], use_threads=False), step)


def columns_of(table: pa.Table, step: int) -> SampleColumns:
    """Of the columns that the table has."""
    num = table.num_rows
    lengths = _lengths(table, num)
    oldest, newest = _version_range(table, lengths)
    return SampleColumns(
        step=np.full(num, step, np.int32),
        row=np.arange(num, dtype=np.int32),
        index=_integers(table, "index", num),
        group=_integers(table, "group_index", num),
        reward=_floats(table, "reward", num),
        length=lengths.astype(np.int32),
        advantage=_means(table, "advantages", num),
        staleness=np.where(oldest >= 0, newest - oldest, -1).astype(np.int16),
        status=_statuses(table, num),
        kept=np.asarray(table["kept"].fill_null(True).to_numpy(), bool) if "kept" in table.schema.names else np.ones(num, bool),
        prompt=_prompt_hashes(table, num),
    )


def prompt_hash(text: str | None) -> int:
    """The same in every process and for every file; 63 bits."""
    return int.from_bytes(hashlib.blake2b((text or "").encode(), digest_size=8).digest()) >> 1


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
    for name in ("loss_mask", "versions"):
        column = _list_column(table, name)
        if column is not None:
            return _counts(column)
    return np.zeros(num, np.int32)


def _version_range(table: pa.Table, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """[N] the oldest version of each sample, -1 without tokens; the newest of all."""
    num = len(lengths)
    column = _list_column(table, "versions")
    if column is None or not len(column.flatten()):
        return np.full(num, -1, np.int64), -1
    values = column.flatten().to_numpy()
    counts = _counts(column)
    oldest = np.full(num, -1, np.int64)
    filled = counts > 0
    oldest[filled] = np.minimum.reduceat(values, (np.cumsum(counts) - counts)[filled])
    return oldest, int(values.max())


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


def _prompt_hashes(table: pa.Table, num: int) -> np.ndarray:
    if "prompt" not in table.schema.names:
        return np.full(num, -1, np.int64)
    texts, per_row = _dictionary(table["prompt"])
    hashes = np.array([prompt_hash(text) for text in texts] or [-1], np.int64)
    return np.where(per_row >= 0, hashes[per_row], -1)


def _dictionary(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """The different texts, and each row's among them; -1 for null."""
    encoded = column.combine_chunks() if pa.types.is_dictionary(column.type) else column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):  # dictionaries of row groups that differ
        encoded = encoded.unify_dictionaries().combine_chunks()
    return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
