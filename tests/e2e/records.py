"""Records, samples and checkpoints of a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from fuligo.observability.metrics import without_timings
from tests.metrics_page import undocumented

TOKENS = ("index", "group_index", "response_ids", "engine_logprobs", "trainer_logprobs", "advantages", "versions", "kept")
"""Columns of samples/ that are bit for bit equal in two equal runs."""


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(run_dir: Path) -> list[dict]:
    """Return the records of a run without timings. docs/metrics.md documents each of their keys."""
    records = json_lines(run_dir / "metrics.jsonl")
    assert undocumented(key for record in records for key in record) == []
    return [dict(without_timings(record)) for record in records]


def evaluations(run_dir: Path) -> list[dict]:
    """Return the records of a run's evaluations. docs/metrics.md documents each of their keys."""
    records = json_lines(run_dir / "eval" / "metrics.jsonl")
    assert undocumented(key for record in records for key in record if key != "num_rollouts") == []
    return records


def sample_rows(run_dir: Path, *columns: str) -> list[dict]:
    """Return all samples of a run in order, each with its `step`."""
    rows = []
    for path in sorted((run_dir / "samples").glob("rollout_*.parquet")):
        step = int(path.stem.removeprefix("rollout_"))
        rows += [{"step": step, **row} for row in pq.read_table(path, columns=list(columns)).to_pylist()]
    return rows


def checkpoint(run_dir: Path, num_rollouts: int) -> Path:
    return run_dir / "checkpoints" / f"iter_{num_rollouts:07d}"
