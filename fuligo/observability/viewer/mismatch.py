"""Diagnosis of a disagreement between engine and trainer from the tokens of one step: stale weights, one engine, or all tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuligo.observability.viewer.sample_rows import check_size

OUTLIER_RATIO = 3.0
"""Factor by which tokens must differ more than the others to be the cause."""
UNKNOWN = -1
"""Engine of tokens whose engine was not recorded."""
_NOT_AGE = "precision, sampling parameters or routing"
_NAMES = ["loss_mask", "engine_logprobs", "trainer_logprobs", "versions"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Trained tokens of one policy version, sampled by one engine."""

    version: int
    engine: int
    """Number of the engine, or `UNKNOWN`."""
    num_tokens: int
    abs_diff: float
    """Mean absolute difference between the trainer's and the engine's log-probabilities, nats."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Cause of a disagreement."""

    brief: str
    """Text that follows "Engine and trainer disagree since step 41: "."""
    text: str


def mismatches(path: Path) -> list[Mismatch]:
    """Return the mismatches of one samples file, oldest version first; empty if it lacks one of the log-probabilities."""
    with pq.ParquetFile(path) as file:
        present = file.schema_arrow.names
        if not set(_NAMES) <= set(present):
            return []
        check_size(file.metadata, {*_NAMES, "spans"})
        table = file.read([*_NAMES, *(["spans"] if "spans" in present else [])], use_threads=False)
    table = table.filter(table["trainer_logprobs"].is_valid())
    mask, engine_logprobs, trainer_logprobs, versions = (table[name].combine_chunks().flatten().to_numpy() for name in _NAMES)
    if not len(mask) == len(engine_logprobs) == len(trainer_logprobs) == len(versions):
        return []
    trained = mask > 0
    diff = np.abs(trainer_logprobs - engine_logprobs)[trained]
    who = np.stack([versions[trained], _engines(table)[trained]], axis=1)
    kinds, kind_of_token = np.unique(who, axis=0, return_inverse=True)
    of_kind = [diff[kind_of_token.reshape(-1) == kind] for kind in range(len(kinds))]
    return [
        Mismatch(int(version), int(engine), len(part), float(part.mean())) for (version, engine), part in zip(kinds, of_kind, strict=True)
    ]


def explanation(step: int, parts: Sequence[Mismatch], expected: int | None) -> Explanation | None:
    """Explain the disagreement of a step; None if its tokens do not show a cause.

    `expected`: version that the step's newest tokens should have; None if unknown.
    """
    if not parts:
        return None
    newest = max(part.version for part in parts)
    if expected is not None and newest < expected:
        served = _served_by({part.engine for part in parts})
        late = f"No token of step {step} is newer, although version {expected} was due: the engines were not updated."
        return Explanation(f"weight version {newest} still served by {served}", late)
    of_version = _outstanding(parts, lambda part: part.version)
    if of_version and of_version[0].version < newest:
        return _stale(step, parts, of_version, newest)
    of_engine = _outstanding(parts, lambda part: part.engine)
    if of_engine and of_engine[0].engine != UNKNOWN:
        engine = of_engine[0].engine
        text = f"{_compared(step, parts, of_engine, f'engine {engine}')}: its weights or settings differ from those that it reports."
        return Explanation(f"engine {engine} only", text)
    if of_version:
        text = f"{_compared(step, parts, of_version, f'version {newest}')}: the newest weights are wrong."
        return Explanation(f"weight version {newest} only", text)
    versions = sorted({part.version for part in parts})
    those = f"of version {versions[0]}" if len(versions) == 1 else f"of all versions ({', '.join(map(str, versions))})"
    return Explanation(
        "all tokens equally", f"In step {step} tokens {those} and of all engines disagree equally, so the cause is {_NOT_AGE}."
    )


def _stale(step: int, parts: Sequence[Mismatch], stale: Sequence[Mismatch], newest: int) -> Explanation:
    """Explain that the tokens of older versions differ."""
    version = stale[0].version
    compared = _compared(step, parts, stale, f"version {version}")
    updated = {part.engine for part in parts if part.version == newest}
    behind = {part.engine for part in stale} - updated
    if not behind and updated != {UNKNOWN}:
        text = f"{compared}. Every engine also sampled with version {newest}: these responses were started before it and continued."
        return Explanation(f"tokens of weight version {version}", text)
    return Explanation(f"weight version {version} still served by {_served_by(behind)}", f"{compared}; others had {newest}.")


def _outstanding(parts: Sequence[Mismatch], key: Callable[[Mismatch], int]) -> list[Mismatch]:
    """Return the parts of the one version, or of the one engine, that differs far more than the rest; empty if there is none."""
    values = {key(part) for part in parts}
    worst = max(values, key=lambda value: _mean(part for part in parts if key(part) == value))
    rest = [part for part in parts if key(part) != worst]
    own = [part for part in parts if key(part) == worst]
    return own if rest and _mean(own) >= OUTLIER_RATIO * _mean(rest) else []


def _compared(step: int, parts: Sequence[Mismatch], own: Sequence[Mismatch], who: str) -> str:
    rest = [part for part in parts if part not in own]
    share = sum(part.num_tokens for part in own) / sum(part.num_tokens for part in parts)
    return (
        f"In step {step} the {share:.0%} of tokens that {who} sampled differ by {_mean(own):.3g} nats and the others by {_mean(rest):.3g}"
    )


def _served_by(engines: set[int]) -> str:
    """Format engines as `engine 2` or `engines 2 and 5`."""
    known = sorted(engines - {UNKNOWN})
    if not known:
        return "an engine"
    return f"engine {known[0]}" if len(known) == 1 else f"engines {', '.join(map(str, known[:-1]))} and {known[-1]}"


def _mean(parts: Iterable[Mismatch]) -> float:
    """Return the mean absolute difference over tokens, nats."""
    listed = list(parts)
    return sum(part.abs_diff * part.num_tokens for part in listed) / sum(part.num_tokens for part in listed)


def _engines(table: pa.Table) -> np.ndarray:
    """Return the engine of every response token of the table, [T]."""
    counts = table["versions"].combine_chunks().value_lengths().fill_null(0).to_numpy()
    engines = np.full(int(counts.sum()), UNKNOWN, np.int64)
    if "spans" not in table.schema.names or table.schema.field("spans").type.value_type.get_field_index("engine") < 0:
        return engines
    for start, num_tokens, spans in zip(np.cumsum(counts) - counts, counts, table["spans"].to_pylist(), strict=True):
        for span in spans or ():
            if span["engine"] is not None:
                end = min(span["first_token"] + span["num_tokens"], num_tokens)
                engines[start + span["first_token"] : start + end] = span["engine"]
    return engines
