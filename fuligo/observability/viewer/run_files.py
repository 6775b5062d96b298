"""Run directories and their files. Links that lead out of a run directory are not read."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from fuligo.errors import ConfigError

MARKS = ("metrics.jsonl", "config.yaml", "samples", "trace.json")
"""Entries that mark a run directory; one of them is enough, so that damaged runs can be viewed too."""
SampleSet = Literal["train", "eval"]
_FILES: dict[SampleSet, tuple[str, str]] = {"train": ("samples", "rollout"), "eval": ("eval", "eval")}
"""Directory and prefix of file names."""


@dataclass(frozen=True, slots=True)
class SampleFile:
    """Sample file of one rollout or one evaluation."""

    step: int
    """Rollout id; for an evaluation, the number of complete rollouts before it."""
    path: Path
    version: tuple[int, int]
    """Modification time and size, which change if the file is replaced."""


def inside(run: Path, path: Path) -> bool:
    """Return whether a path is inside the run directory; links that lead elsewhere are not read."""
    try:
        return path.resolve(strict=True).is_relative_to(run.resolve(strict=True))
    except OSError:
        return False


def is_readable(run: Path, path: Path) -> bool:
    """Return whether a path is a plain file inside the run directory; opening a pipe would block forever."""
    return inside(run, path) and path.is_file()


def sample_path(run: Path, of: SampleSet, step: int) -> Path | None:
    """Return the sample file of a step; None if there is none."""
    directory, prefix = _FILES[of]
    path = run / directory / f"{prefix}_{step:06d}.parquet"
    return path if not path.is_symlink() and is_readable(run, path) else None


def sample_files(run: Path, of: SampleSet = "train") -> Iterator[SampleFile]:
    """Yield the sample files of training or of the evaluations, in no particular order."""
    name, prefix = _FILES[of]
    directory = run / name
    try:
        entries = list(directory.iterdir()) if inside(run, directory) else []
    except OSError:
        return
    for path in entries:
        if match := re.fullmatch(prefix + r"_(\d{6,12})\.parquet", path.name):
            try:
                state = path.lstat()
            except OSError:
                continue
            if S_ISREG(state.st_mode):  # neither a link nor a pipe
                yield SampleFile(int(match[1]), path, (state.st_mtime_ns, state.st_size))


def missing_files(run: Path) -> list[str]:
    """Describe each usual file that the run lacks, and what the page cannot show without it."""
    found = [
        ("metrics.jsonl", "no curves, no health"),
        ("config.yaml", "no settings to compare, no expected end, no token texts"),
        ("trace.json", "no phases: the time view has only the seconds in the metrics"),
    ]
    texts = [f"{name} is missing: {lost}" for name, lost in found if not (run / name).is_file()]
    if not any(sample_files(run)):
        texts.append("samples/ is missing or empty: no samples to look at (--save-samples is off, or no step is complete yet)")
    return texts


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return each path if it is a run, else the runs directly inside it, by name.

    Raises ConfigError if a path is not a directory or has no run.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory; use a run directory (--run-dir of fuligo train) or a directory of these")
        runs = [path] if _is_run(path) else sorted(child for child in path.iterdir() if _is_readable_run(child))
        if not runs:
            raise ConfigError(f"{path} has no run: neither {', '.join(MARKS)} nor directories with them; use a run directory")
        found += [run for run in runs if run.resolve() not in {other.resolve() for other in found}]
    return found


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return short, distinct names for links: the directory's name, preceded by its parents' if it is not unique."""
    names = [path.resolve().name or "run" for path in paths]
    for depth in range(2, 8):
        taken = {name for name in names if names.count(name) > 1}
        names = ["/".join(path.resolve().parts[-depth:]) if name in taken else name for path, name in zip(paths, names, strict=True)]
    return names


def _is_readable_run(path: Path) -> bool:
    """Return whether a path is a run that this user may read."""
    try:
        return path.is_dir() and _is_run(path)
    except PermissionError:
        return False


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in MARKS)
