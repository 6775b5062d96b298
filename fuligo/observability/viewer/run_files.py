"""The files of a run directory, none outside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SampleSet = Literal["train", "eval"]
_FILES: dict[SampleSet, tuple[str, str]] = {"train": ("samples", "rollout"), "eval": ("eval", "eval")}
"""Directory, and what names begin with."""


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The samples of one rollout, or of one evaluation."""

    step: int
    """Rollout id; of an evaluation, complete rollouts before it."""
    path: Path
    version: tuple[int, int]
    """Modification time and size: another file in its place is another version."""


def inside(run: Path, path: Path) -> bool:
    """A link could lead anywhere: only what lies in the run directory itself is read."""
    try:
        return path.resolve(strict=True).is_relative_to(run.resolve(strict=True))
    except OSError:
        return False


def sample_path(run: Path, of: SampleSet, step: int) -> Path | None:
    """Where the samples of a step are, if they are there."""
    directory, prefix = _FILES[of]
    path = run / directory / f"{prefix}_{step:06d}.parquet"
    return path if path.is_file() and not path.is_symlink() and inside(run, path) else None


def sample_files(run: Path, of: SampleSet = "train") -> Iterator[SampleFile]:
    """In the directory's order."""
    name, prefix = _FILES[of]
    directory = run / name
    try:
        entries = list(directory.iterdir()) if inside(run, directory) else []
    except OSError:
        return
    for path in entries:
        match = re.fullmatch(prefix + r"_(\d{6,12})\.parquet", path.name)
        if match and not path.is_symlink():
            try:
                state = path.stat()
            except OSError:
                continue
            yield SampleFile(int(match[1]), path, (state.st_mtime_ns, state.st_size))


def missing_files(run: Path) -> list[str]:
    """What a run usually leaves and this one did not, each with what cannot be shown for it."""
    found = [
        ("metrics.jsonl", "no curves, no health"),
        ("config.yaml", "no settings to compare, no expected end, no token texts"),
        ("trace.json", "no phases: the time view knows the metrics' seconds alone"),
    ]
    texts = [f"{name} is missing: {lost}" for name, lost in found if not (run / name).is_file()]
    if not any(sample_files(run)):
        texts.append("samples/ is missing or empty: no samples to look at (save_samples off, or no step is over yet)")
    return texts
