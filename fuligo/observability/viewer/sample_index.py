"""Where every sample of a run is, kept up to date file by file: newest steps first, so that one never waits for all of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from fuligo.observability.viewer.run_files import SampleFile, SampleSet, sample_files, sample_path
from fuligo.observability.viewer.sample_columns import SampleColumns, joined, no_samples, read_sample_columns


class SampleIndex:
    """Columns of the files read so far. `update` is called from a thread of its own; `columns` never reads a file."""

    def __init__(self, run: Path, of: SampleSet = "train") -> None:
        self._run = run
        self._of: SampleSet = of
        self._lock = threading.Lock()
        self._known: dict[int, tuple[SampleFile, SampleColumns | None]] = {}
        self._num_files = 0
        self._joined: tuple[int, SampleColumns] = (0, no_samples())
        self._engines: tuple[int, list[int]] = (0, [])
        self.version = 0
        """Rises with every change."""
        self.damaged: dict[int, str] = {}
        """By step: files that cannot be read, and why."""

    def update(self, budget_s: float = float("inf")) -> bool:
        """Read files that are new or have changed, until all are known or the time is over; whether something changed."""
        files = {file.step: file for file in sample_files(self._run, self._of)}
        gone = [step for step in self._known if step not in files]
        pending = [file for step, file in sorted(files.items(), reverse=True) if self._is_new(file)]
        with self._lock:
            self._num_files = len(files)
            for step in gone:
                del self._known[step]
                self.damaged.pop(step, None)
            self.version += bool(gone)
        end = time.monotonic() + budget_s
        for file in pending:
            self._read(file)
            if time.monotonic() > end:
                break
        return bool(gone or pending)

    @property
    def progress(self) -> tuple[int, int]:
        """Files known, and files there are."""
        return len(self._known), self._num_files

    def columns(self) -> SampleColumns:
        """Of everything known, in the order of steps."""
        with self._lock:
            version, columns = self._joined
            if version != self.version:
                parts = [columns for _, (_, columns) in sorted(self._known.items()) if columns is not None]
                columns = joined(parts) if parts else no_samples()
                self._joined = (self.version, columns)
            return columns

    def engines(self) -> list[int]:
        """Numbers of those that sampled, as far as is known."""
        columns = self.columns()
        version = self._joined[0]
        if self._engines[0] != version:
            self._engines = (version, [int(number) for number in np.unique(columns.engine) if number >= 0])
        return self._engines[1]

    def file(self, step: int) -> Path | None:
        """Of a step; found without the index, too."""
        known = self._known.get(step)
        return known[0].path if known is not None else sample_path(self._run, self._of, step)

    def file_version(self, step: int) -> tuple[int, int] | None:
        """Of the file that is known of a step."""
        known = self._known.get(step)
        return None if known is None else known[0].version

    def steps(self) -> list[int]:
        with self._lock:
            return sorted(self._known)

    def _is_new(self, file: SampleFile) -> bool:
        known = self._known.get(file.step)
        return known is None or known[0] != file

    def _read(self, file: SampleFile) -> None:
        try:
            columns, problem = read_sample_columns(file.path, file.step), None
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            columns, problem = None, " ".join(str(error).split())[:200]
        with self._lock:
            self._known[file.step] = (file, columns)
            self.version += 1
            if problem is None:
                self.damaged.pop(file.step, None)
            else:
                self.damaged[file.step] = problem
