"""Writer of a run directory: creation, lock, and the files that a run writes."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from fuligo.config import Config
from fuligo.config.files import save_yaml
from fuligo.errors import ConfigError
from fuligo.formats.disk import is_foreign_link, try_lock
from fuligo.observability.jsonl import JsonLines, Record, read_json_lines
from fuligo.observability.samples import Training, sample_table, write_table
from fuligo.observability.trace import Trace
from fuligo.types import SampleGroup

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
CHECKPOINTS = "checkpoints"
_NUMBERED = re.compile(r"(?:rollout|eval)_(\d+)\.parquet")


class RunDirectory:
    """Writer of a run directory: `config.yaml`, `metrics.jsonl`, `samples/`, `eval/`, `trace.json`, `log.txt`, `checkpoints/`.

    A lock ensures that only one process writes to it. Methods that write raise FuligoError if a file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        """Open an existing directory, lock it, and send fuligo's log to its `log.txt`; `create` also checks and creates the directory.

        Raises ConfigError if another process holds the lock.
        """
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.samples = path / "samples"
        self.eval = path / "eval"
        self.log_file = path / "log.txt"
        self.config_file = path / "config.yaml"
        for directory in (self.samples, self.eval, self.checkpoints):
            directory.mkdir(exist_ok=True)
        self._lock = _lock(path)
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.evaluations = JsonLines(self.eval / "metrics.jsonl")
        self.trace = Trace(path / "trace.json")
        handler = _LogFile(self.log_file, encoding="utf-8")
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logger = logging.getLogger("fuligo")
        logger.addHandler(handler)
        logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
        self._log = handler
        sample_table([])  # pyarrow imports lazily with its first table, which should not slow down the first step

    @classmethod
    def create(cls, path: Path, config: Config, *, resume: bool) -> RunDirectory:
        """Create the directory, or reuse that of an earlier run, and write `config.yaml`.

        With `resume`, steps recorded after the checkpoint may be removed later (`cut_back`); otherwise no recorded step is overwritten.
        Raises ConfigError if the directory is not writable, is in use, has links of another user or files that do not belong to a run, or
        has recorded steps without `resume`.
        """
        require_usable(path, resume=resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "metrics.jsonl").touch()
            run = cls(path)
            save_yaml(config, run.config_file)
        except OSError as error:
            raise ConfigError(f"cannot write the run directory {path}: {error.strerror}; choose another with --run-dir") from None
        return run

    def record(self, record: Record) -> None:
        """Append one step to `metrics.jsonl`."""
        self.metrics.append(record)

    def write_samples(
        self,
        step: int,
        groups: Sequence[SampleGroup],
        training: Training | None = None,
        *,
        reward_key: str | None = None,
        pass_key: str | None = None,
    ) -> Path:
        """Write `samples/rollout_000123.parquet`: every sample of the rollout, including dropped and aborted ones.

        Args:
            reward_key: key of the value in dict rewards that is trained on.
            pass_key: key of the value in dict rewards that decides whether a sample passes, if they have it.
        """
        path = self.samples / f"rollout_{step:06d}.parquet"
        write_table(path, sample_table(groups, training, reward_key=reward_key, pass_key=pass_key))
        return path

    def write_evaluation(
        self,
        num_rollouts: int,
        groups: Mapping[str, Sequence[SampleGroup]],
        record: Record,
        *,
        reward_keys: Mapping[str, str | None] | None = None,
    ) -> Path:
        """Write `eval/eval_000020.parquet` and a line of `eval/metrics.jsonl` for an evaluation after 20 complete rollouts.

        `groups`: by name of the dataset, which becomes the column `dataset`. `reward_keys`: key of the value in dict rewards that is
        reported, by name of the dataset.
        """
        keys = reward_keys or {}
        table = pa.concat_tables([sample_table([]), *(sample_table(of_set, reward_key=keys.get(name)) for name, of_set in groups.items())])
        datasets = [name for name, of_set in groups.items() for group in of_set for _ in group.samples]
        path = self.eval / f"eval_{num_rollouts:06d}.parquet"
        write_table(path, table.add_column(0, "dataset", pa.array(datasets, pa.string())))
        self.evaluations.append({"num_rollouts": num_rollouts, **record})
        return path

    def cut_back(self, step: int) -> None:
        """Remove the records, samples and trace of `step` and later steps, because the run resumes there.

        The evaluation of the weights before `step` stays, unless `step` is 0.
        """
        self.metrics.cut_back(lambda record: record["step"] < step)
        self.evaluations.cut_back(lambda record: step > 0 and record["num_rollouts"] <= step)
        self.trace.cut_back(step)
        _remove_from(self.samples, step)
        _remove_from(self.eval, step + 1 if step else 0)

    def records(self) -> list[Record]:
        """Return the steps recorded so far."""
        return read_json_lines(self.metrics.path)

    def evaluation_records(self) -> list[Record]:
        """Return the evaluations recorded so far: `num_rollouts` and `eval/*`."""
        return read_json_lines(self.evaluations.path)

    def close(self) -> None:
        """Close all files and release the lock."""
        self.metrics.close()
        self.evaluations.close()
        self.trace.close()
        logging.getLogger("fuligo").removeHandler(self._log)
        self._log.close()
        os.close(self._lock)


def require_usable(path: Path, *, resume: bool) -> None:
    """Check that a path is new, empty, or a run directory that no job uses; recorded steps are accepted only with `resume`.

    Raises ConfigError if not.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"--run-dir {path} is a file; use a directory that is new, empty, or of an earlier run")
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot read the run directory {path}: {error.strerror}; choose another with --run-dir") from None
    if foreign := [name for name in names if is_foreign_link(path / name)]:
        raise ConfigError(
            f"--run-dir {path} contains links of another user ({', '.join(foreign[:3])}), through which this run would overwrite files; "
            "remove the links, or use another directory"
        )
    if names and "metrics.jsonl" not in names:
        raise ConfigError(f"--run-dir {path} has files that do not belong to a run ({', '.join(names[:3])}); use a new or empty directory")
    if names and not resume and (path / "metrics.jsonl").stat().st_size > 0:
        raise ConfigError(
            f"--run-dir {path} already has recorded steps; use a new directory, or continue that run with --load {path / CHECKPOINTS} "
            "(without a checkpoint there, the run starts over)"
        )
    if names:
        os.close(_lock(path))


def _lock(path: Path) -> int:
    """Take the lock of a run directory, which the kernel releases when the process ends.

    Return its file descriptor. Raises ConfigError if another process holds the lock.
    """
    fd = try_lock(path / "metrics.jsonl")
    if fd is None:
        raise ConfigError(f"--run-dir {path} is in use by a running job; wait for it, or use another directory")
    return fd


class _LogFile(logging.FileHandler):
    """Log file that ignores failed writes; a full disk is reported when the records of the run are written."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _remove_from(directory: Path, first: int) -> None:
    """Remove unfinished files and those numbered `first` or higher."""
    for file in directory.iterdir():
        match = _NUMBERED.fullmatch(file.name)
        if file.suffix == ".tmp" or (match and int(match[1]) >= first):
            file.unlink()
