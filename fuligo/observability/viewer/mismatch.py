"""Why engine and trainer disagree, by the tokens of one step: a stale version, or everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STANDS_OUT = 3.0
"""A version whose tokens differ so many times as much as the others' is the cause."""


_NOT_AGE = "precision, sampling parameters or routing"


@dataclass(frozen=True, slots=True)
class VersionMismatch:
    """Trained tokens of one policy version."""

    version: int
    num_tokens: int
    abs_diff: float
    """Mean distance of the trainer's log-probabilities from the engine's, nats."""


def mismatch_by_version(path: Path) -> list[VersionMismatch]:
    """Of one samples file, oldest version first; nothing where it does not hold both sides.

    Raises:
        OSError, pa.ArrowException: the file cannot be read.
    """
    names = ["loss_mask", "engine_logprobs", "trainer_logprobs", "versions"]
    with pq.ParquetFile(path) as file:
        if not set(names) <= set(file.schema_arrow.names):
            return []
        table = file.read(names, use_threads=False)
    table = table.filter(table["trainer_logprobs"].is_valid())
    mask, engine, trainer, versions = (_flat(table, name) for name in names)
    if not len(mask) == len(engine) == len(trainer) == len(versions):
        return []
    trained = mask > 0
    diff = np.abs(trainer - engine)[trained]
    of_token = versions[trained]
    return [
        VersionMismatch(int(version), int((of_token == version).sum()), float(diff[of_token == version].mean()))
        for version in np.unique(of_token)
    ]


def explanation(step: int, by_version: list[VersionMismatch], expected: int | None) -> str | None:
    """What the tokens of the step say.

    Args:
        expected: version of the weights that the step was trained from, where known.
    """
    if not by_version:
        return None
    worst = max(by_version, key=lambda part: part.abs_diff)
    others = [part for part in by_version if part is not worst]
    if not others:
        if expected is not None and worst.version < expected:
            late = f"the trainer stood at {expected}: the engines were not updated"
            return f"Every token of step {step} was sampled by version {worst.version}, {late}."
        return f"All tokens of step {step} come from version {worst.version}: it is not their age, but {_NOT_AGE}."
    rest = sum(part.abs_diff * part.num_tokens for part in others) / sum(part.num_tokens for part in others)
    newest = max(part.version for part in by_version)
    if worst.abs_diff < STANDS_OUT * rest:
        return f"Tokens of all versions ({', '.join(str(part.version) for part in by_version)}) differ alike: it is {_NOT_AGE}."
    share = worst.num_tokens / sum(part.num_tokens for part in by_version)
    stale = (
        f"an engine still served version {worst.version} while others had {newest}"
        if worst.version < newest
        else "the newest weights are wrong"
    )
    return (
        f"In step {step} the {share:.0%} of tokens that version {worst.version} sampled differ by {worst.abs_diff:.3g} nats, "
        f"the others by {rest:.3g}: {stale}."
    )


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return table[name].combine_chunks().flatten().to_numpy()
