"""Discovery of run directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fuligo.errors import ConfigError

MARKS = ("metrics.jsonl", "config.yaml", "samples", "trace.json")
"""Entries of which any one marks a run directory, so that damaged runs can be viewed too."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return each path if it is a run, else the runs directly inside it, by name.

    Raises:
        ConfigError: a path is not a directory or has no run.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory; give a run directory (--run-dir of fuligo train) or a directory of these")
        runs = [path] if _is_run(path) else sorted(child for child in path.iterdir() if child.is_dir() and _is_run(child))
        if not runs:
            raise ConfigError(f"{path} has no run: neither {', '.join(MARKS)} nor directories with them; give a run directory")
        found += [run for run in runs if run.resolve() not in {other.resolve() for other in found}]
    return found


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return short, distinct names for links: the directory's name, preceded by its parents' if it is not unique."""
    names = [path.resolve().name or "run" for path in paths]
    for depth in range(2, 8):
        taken = {name for name in names if names.count(name) > 1}
        names = ["/".join(path.resolve().parts[-depth:]) if name in taken else name for path, name in zip(paths, names, strict=True)]
    return names


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in MARKS)
