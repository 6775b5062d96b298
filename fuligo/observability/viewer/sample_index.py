"""Index of a run's samples: a table of a few numbers per sample, no text and no tokens, kept up to date file by file."""

import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from fuligo.observability.samples import PARTS, VERSIONS_IN_FOOTER
from fuligo.observability.viewer.run_files import SampleFile, SampleSet, sample_files, sample_path
from fuligo.observability.viewer.sample_rows import check_size

INDEX_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("row", pa.int32()),
        ("index", pa.int64()),
        ("group", pa.int64()),
        ("reward", pa.float32()),
        ("passed", pa.bool_()),
        ("parts", PARTS),
        ("length", pa.int32()),
        ("advantage", pa.float32()),
        ("staleness", pa.int32()),
        ("engine", pa.int16()),
        ("status", pa.string()),
        ("kept", pa.bool_()),
        ("prompt", pa.int64()),
        ("dataset", pa.string()),
    ]
)
"""Columns of the index, null where the file of a step lacks the value. `row`: position in that file; `length`: response tokens;
`advantage`: mean over the response; `staleness`: versions between the sample's oldest token and the newest token of its step; `engine`:
number of the engine that sampled the last tokens; `prompt`: key of the prompt's text (`prompt_key`); `dataset`: its name, in
evaluations."""
_STORED = {
    **{name: name for name in ("index", "reward", "passed", "parts", "engine", "status", "kept", "dataset")},
    **{"group": "group_index", "length": "response_length", "advantage": "advantage_mean", "prompt": "prompt_key"},
}
"""Column of the index -> column of the file from which it is read."""
_READ = {*_STORED.values(), "oldest_version"}


class SampleIndex:
    """Index of the sample files, which are read newest first. One thread calls `update`; `table` never reads a file."""

    def __init__(self, run: Path, of: SampleSet = "train") -> None:
        self._run = run
        self._of: SampleSet = of
        self._lock = threading.Lock()
        self._known: dict[int, tuple[SampleFile, pa.Table | None]] = {}
        self._num_files = 0
        self._joined: tuple[int, pa.Table, list[int], list[str]] = (0, INDEX_SCHEMA.empty_table(), [], [])
        self._version = 0
        """Incremented with every change."""
        self.damaged: dict[int, str] = {}
        """Step -> reason why its file cannot be read."""

    def update(self, budget_s: float = float("inf")) -> bool:
        """Read new and changed files until all are known or `budget_s` is used up; return whether anything changed."""
        files = {file.step: file for file in sample_files(self._run, self._of)}
        gone = self._known.keys() - files.keys()
        pending = [file for step, file in sorted(files.items(), reverse=True) if step not in self._known or self._known[step][0] != file]
        with self._lock:
            self._num_files = len(files)
            for step in gone:
                del self._known[step]
                self.damaged.pop(step, None)
            self._version += bool(gone)
        end = time.monotonic() + budget_s
        for file in pending:
            table, problem = None, ""
            try:
                table = read_index_table(file.path, file.step)
            except Exception as error:  # a run directory of a stranger may hold anything
                problem = " ".join(str(error).split())[:200]
            with self._lock:
                self._known[file.step] = (file, table)
                self._version += 1
                self.damaged.pop(file.step, None)
                if problem:
                    self.damaged[file.step] = problem
            if time.monotonic() > end:
                break
        return bool(gone or pending)

    @property
    def progress(self) -> tuple[int, int]:
        """Number of indexed files and number of all files. A damaged file counts as indexed."""
        return len(self._known), self._num_files

    def table(self) -> pa.Table:
        """Return the index (`INDEX_SCHEMA`) of all files read so far, ordered by step and row."""
        return self._up_to_date()[1]

    def engines(self) -> list[int]:
        return self._up_to_date()[2]

    def parts(self) -> list[str]:
        """Return the names of the parts of rewards."""
        return self._up_to_date()[3]

    def file(self, step: int) -> Path | None:
        """Return the file of a step, even if it is not indexed yet; None if there is none."""
        known = self._known.get(step)
        return known[0].path if known is not None else sample_path(self._run, self._of, step)

    def file_version(self, step: int) -> tuple[int, int] | None:
        known = self._known.get(step)
        return None if known is None else known[0].version

    def steps(self) -> list[int]:
        """Return the steps that are known, in order."""
        with self._lock:
            return sorted(self._known)

    def _up_to_date(self) -> tuple[int, pa.Table, list[int], list[str]]:
        with self._lock:
            if self._joined[0] != self._version:
                parts = [part for _, (_, part) in sorted(self._known.items()) if part is not None]
                table = pa.concat_tables([INDEX_SCHEMA.empty_table(), *parts]).combine_chunks()
                engines = sorted(table["engine"].unique().drop_null().to_pylist())
                names = [part.as_py() for chunk in table["parts"].chunks for part in chunk.keys.unique()]
                self._joined = (self._version, table, engines, sorted(set(names)))
            return self._joined


def read_index_table(path: Path, step: int) -> pa.Table:
    """Return the index (`INDEX_SCHEMA`) of one file."""
    fragment = next(iter(ds.dataset(path, format="parquet").get_fragments()))
    check_size(fragment.metadata, _READ)
    # The statistics in the footer hold the greatest version of any token.
    places = [at for at in range(fragment.metadata.num_columns) if fragment.metadata.schema.column(at).path == VERSIONS_IN_FOOTER]
    found = [fragment.metadata.row_group(group).column(at).statistics for group in range(fragment.metadata.num_row_groups) for at in places]
    newest = max((each.max for each in found if each is not None and each.has_min_max), default=None)
    table = fragment.to_table(columns=sorted(_READ.intersection(fragment.physical_schema.names)), use_threads=False)
    num, none = table.num_rows, pa.nulls(table.num_rows)

    def column(name: str) -> pa.ChunkedArray | pa.Array:
        return table[name] if name in table.column_names else none

    columns = {
        **{name: column(stored) for name, stored in _STORED.items()},
        "step": pa.repeat(pa.scalar(step, pa.int32()), num),
        "row": pa.array(np.arange(num, dtype=np.int32)),
        "kept": pc.fill_null(column("kept").cast(pa.bool_()), True),
        "staleness": pc.call_function("subtract", [pa.scalar(newest, pa.int32()), column("oldest_version").cast(pa.int32())]),
    }
    return pa.table([columns[field.name].cast(field.type) for field in INDEX_SCHEMA], schema=INDEX_SCHEMA)
