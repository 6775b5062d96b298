"""Sample files (`samples/rollout_000123.parquet`): every sample of a rollout with everything known about it, token by token.

Columns are built from flat arrays, so that a rollout of thousands of samples takes milliseconds. Row groups of at most 64
rows let a reader fetch one sample without reading the whole file. Properties to search by have their own columns, so that a search reads
no tokens.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fuligo.formats.disk import writing
from fuligo.observability.sample_turns import TURNS, turns_column
from fuligo.types import Sample, SampleGroup, TokenScores, TrainSample

ROWS_PER_GROUP = 64
BYTES_PER_GROUP = 2**27
"""Largest size of a row group before compression, unless one row is larger: half of what `fuligo view` reads at once."""
_SPAN = pa.struct(
    [
        ("name", pa.string()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("engine", pa.int16()),
        ("first_token", pa.int32()),
        ("num_tokens", pa.int32()),
    ]
)
_IMAGES = pa.list_(
    pa.struct(
        [
            ("source", pa.string()),
            ("digest", pa.string()),
            ("first_token", pa.int32()),
            ("num_rows", pa.int32()),
            ("num_columns", pa.int32()),
        ]
    )
)
"""Images of the prompt: source, digest (as in `PromptImage`), position and grid of their tokens."""
PARTS = pa.map_(pa.string(), pa.float64())
"""Parts of a reward by name: the numbers in a dict reward, and with --extra-rm-path the metrics `reward_<name>`."""
SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("group_index", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("label", pa.string()),
        ("reward", pa.float64()),
        ("passed", pa.bool_()),
        ("parts", PARTS),
        ("status", pa.string()),
        ("finish_reason", pa.string()),
        ("kept", pa.bool_()),
        ("drop_reason", pa.string()),
        ("error", pa.string()),
        ("engine", pa.int16()),
        ("response_length", pa.int32()),
        ("advantage_mean", pa.float32()),
        ("oldest_version", pa.int32()),
        ("prompt_key", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("engine_logprobs", pa.list_(pa.float32())),
        ("trainer_logprobs", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("entropy", pa.list_(pa.float32())),
        ("values", pa.list_(pa.float32())),
        ("returns", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("metadata", pa.string()),
        ("spans", pa.list_(_SPAN)),
        ("turns", TURNS),
        ("images", _IMAGES),
    ]
)
"""Chat messages, metadata, and labels other than strings are JSON. Columns of the trainer are null for samples that it did not train on."""
_PLAIN = ("index", "group_index", "finish_reason", "engine", "response_length")
_ARRAYS_OF_SAMPLES = ("prompt_ids", "response_ids", "loss_mask", "engine_logprobs", "versions")
_ARRAYS_OF_TRAINING = ("ref_logprobs", "values", "returns", "advantages")
_REPETITIVE = ["prompt", "response", "label", "status", "finish_reason", "drop_reason", "error", "metadata"]
"""Columns with Parquet's dictionary encoding; for token arrays, building a dictionary costs more than it saves."""
VERSIONS_IN_FOOTER = "versions.list.element"
_IN_FOOTER = (
    "index", "group_index", "reward", "passed", "status", "kept", "engine", "response_length", "advantage_mean", "oldest_version",
    "prompt_key", VERSIONS_IN_FOOTER,
)  # fmt: skip
"""Columns whose minimum and maximum in each row group are stored in the file's footer."""
_DEEPEST = 100
"""Maximum depth of nested values that is stored; orjson writes at most 254 levels."""
_DECIMAL_BITS = 14_000
"""Integers of more bits are stored in hexadecimal, because Python writes no more than 4,300 decimal digits."""
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(slots=True, frozen=True)
class Training:
    """Trainer's view of the rollout's samples; empty if nothing was trained."""

    samples: Sequence[TrainSample] = ()
    scores: Mapping[int, TokenScores] | None = None
    """Scores by position in `samples`; None if the trainer returned none."""


def sample_table(
    groups: Sequence[SampleGroup], training: Training | None = None, *, reward_key: str | None = None, pass_key: str | None = None
) -> pa.Table:
    """Return a table with one row per sample, in the order of the groups.

    `reward` is the scalar that is trained on: of a dict reward, the value under `reward_key`. `passed` is the result of
    `Sample.passes`, null without a `reward`. The whole dict and the numbers that hooks report are in the metadata (`reward`, `metrics`).
    `trainer_logprobs` are the old log-probabilities if they were computed, else those of the training forward pass.
    """
    training = training or Training()
    samples = [sample for group in groups for sample in group.samples]
    owners = [group for group in groups for _ in group.samples]
    positions = _match(samples, training.samples)
    trained = [None if position is None else training.samples[position] for position in positions]
    scores = [None if position is None else (training.scores or {}).get(position) for position in positions]
    rewards = [_scalar_reward(sample, reward_key) for sample in samples]
    arrays = {
        **{name: [getattr(sample, name) for sample in samples] for name in _ARRAYS_OF_SAMPLES},
        **{name: [getattr(row, name) if row else None for row in trained] for name in _ARRAYS_OF_TRAINING},
        "trainer_logprobs": [_trainer_logprobs(row, score) for row, score in zip(trained, scores, strict=True)],
        "teacher_logprobs": [
            row.teacher_logprobs if row is not None and row.teacher_logprobs is not None else sample.teacher_logprobs
            for sample, row in zip(samples, trained, strict=True)
        ],
        "entropy": [score.entropy if score else None for score in scores],
    }
    columns: dict[str, Any] = {
        **{name: [getattr(sample, name) for sample in samples] for name in _PLAIN},
        **{name: _lists(rows, SCHEMA.field(name).type.value_type.to_pandas_dtype()) for name, rows in arrays.items()},
        "prompt": [_text(sample.prompt) for sample in samples],
        "response": [_text(sample.response) for sample in samples],
        "label": [_text(sample.label) for sample in samples],
        "reward": rewards,
        "passed": [
            None if reward is None else sample.passes(reward_key, pass_key) for sample, reward in zip(samples, rewards, strict=True)
        ],
        "parts": [_reward_parts(sample) for sample in samples],
        "status": [str(sample.status) for sample in samples],
        "kept": [group.kept for group in owners],
        "drop_reason": [group.drop_reason for group in owners],
        "error": [_text(sample.error or sample.judge_error) for sample in samples],
        "advantage_mean": [float(row.advantages.mean()) if row and len(row.advantages) else None for row in trained],
        "oldest_version": [int(sample.versions.min()) if len(sample.versions) else None for sample in samples],
        "prompt_key": _prompt_keys(groups),
        "metadata": [_metadata(sample) for sample in samples],
        "spans": _spans(samples),
        "turns": turns_column(samples, _text),
        "images": [[{name.name: getattr(image, name.name) for name in _IMAGES.value_type} for image in each.images] for each in samples],
    }
    return pa.Table.from_pydict(columns, schema=SCHEMA)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file atomically. Raises FuligoError if the file cannot be written."""
    unfinished = path.with_name(f".{path.name}.tmp")
    dictionaries = [name for name in table.schema.names if name in _REPETITIVE]
    with writing(path):
        try:
            with pq.ParquetWriter(
                unfinished,
                table.schema,
                compression="zstd",
                use_dictionary=dictionaries,
                write_statistics=[name for name in _IN_FOOTER if name.partition(".")[0] in table.schema.names],
            ) as writer:
                for start in range(0, table.num_rows, ROWS_PER_GROUP):
                    for rows in _bounded(table.slice(start, ROWS_PER_GROUP)):
                        writer.write_table(rows)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)  # after a failure


def _bounded(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows in row groups of at most `BYTES_PER_GROUP`."""
    if rows.num_rows == 1 or rows.nbytes <= BYTES_PER_GROUP:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _bounded(rows.slice(0, half))
    yield from _bounded(rows.slice(half))


def prompt_key(text: str | None) -> int:
    """Return a 63-bit hash of a prompt's text, equal in every process, to find the prompt in other files without reading texts."""
    return int.from_bytes(hashlib.blake2b((text or "").encode(), digest_size=8).digest()) >> 1


def _match(samples: Sequence[Sample], trained: Sequence[TrainSample]) -> list[int | None]:
    """Return the position in `trained` of each sample, or None. Samples split from one response share an index and are matched in order."""
    by_index: dict[int, list[int]] = {}
    for position in reversed(range(len(trained))):
        by_index.setdefault(trained[position].index, []).append(position)
    return [
        positions.pop()
        if (positions := by_index.get(sample.index)) and trained[positions[-1]].response_length == len(sample.response_ids)
        else None
        for sample in samples
    ]


def _trainer_logprobs(row: TrainSample | None, score: TokenScores | None) -> np.ndarray | None:
    if row is not None and row.old_logprobs is not None:
        return row.old_logprobs
    return score.logprobs if score is not None else None


def _scalar_reward(sample: Sample, reward_key: str | None) -> float | None:
    if isinstance(sample.reward, dict) and (reward_key is None or sample.reward.get(reward_key) is None):
        return None
    return None if sample.reward is None else sample.reward_value(reward_key)


def _reward_parts(sample: Sample) -> list[tuple[str, float]] | None:
    """Return the parts of the reward (`PARTS`); None if it has none."""
    given: dict[Any, Any] = sample.reward if isinstance(sample.reward, dict) else {}
    numbers = {str(name): value for name, value in given.items() if isinstance(value, Real)}
    numbers |= {name: value for name, value in sample.metrics.items() if name.startswith("reward_")}
    parts: list[tuple[str, float]] = []
    for name, value in numbers.items():
        with suppress(OverflowError):  # an integer of hundreds of digits
            parts += [(name, float(value))] if math.isfinite(value) else []
    return parts or None


def _prompt_keys(groups: Sequence[SampleGroup]) -> list[int]:
    """Return the key of each sample's prompt; a prompt object that samples of a group share is hashed once."""
    keys: list[int] = []
    for group in groups:
        known: dict[int, int] = {}
        for sample in group.samples:
            same = id(sample.prompt)
            if same not in known:
                known[same] = prompt_key("\n".join([_text(sample.prompt) or "", *(image.digest for image in sample.images)]))
            keys.append(known[same])
    return keys


def _text(value: Any) -> str | None:
    """Return a string as it is, with lone surrogates escaped, None as None, and any other value as JSON."""
    if value is None:
        return None
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else _json(value)


def _metadata(sample: Sample) -> str:
    metadata = sample.metadata
    if isinstance(sample.reward, dict):
        metadata = {"reward": sample.reward, **metadata}
    if sample.metrics:
        metadata = {"metrics": sample.metrics, **metadata}
    return _json(metadata) if metadata else "{}"


def _json(value: Any) -> str:
    """Return JSON for any value of data and hooks. Values that JSON readers cannot hold, such as integers beyond 64 bits, become text."""
    try:
        return orjson.dumps(value, default=str, option=_JSON_OPTIONS).decode()
    except TypeError:
        return orjson.dumps(_storable(value, _DEEPEST), default=repr, option=_JSON_OPTIONS).decode()


def _storable(value: Any, depth: int) -> Any:
    match value:
        case bool() | float() | None:
            return value
        case int():  # pyrefly: ignore[unreachable-match-case]  # `float()` does not match integers
            return value if -(2**63) <= value < 2**64 else str(value) if value.bit_length() < _DECIMAL_BITS else hex(value)
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict() if depth:
            return {str(_storable(key, 0)): _storable(inner, depth - 1) for key, inner in value.items()}
        case list() | tuple() if depth:
            return [_storable(inner, depth - 1) for inner in value]
        case np.ndarray() | np.generic():
            return value.tolist()
    return "..." if not depth else str(value).encode(errors="backslashreplace").decode()


def _lists(rows: Sequence[np.ndarray | None], dtype: type[np.generic]) -> pa.Array:
    """Build a list column, null where a row is None, from one flat array."""
    present = [row for row in rows if row is not None]
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int32, len(rows))
    values = np.concatenate(present, dtype=dtype, casting="unsafe") if present else np.empty(0, dtype)
    missing = pa.array([row is None for row in rows], pa.bool_()) if len(present) < len(rows) else None
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values), mask=missing)


def _spans(samples: Sequence[Sample]) -> pa.Array:
    spans = [span for sample in samples for span in sample.spans]
    columns = [pa.array([getattr(span, field.name) for span in spans], field.type) for field in _SPAN]
    values = pa.StructArray.from_arrays(columns, fields=list(_SPAN))
    return pa.ListArray.from_arrays(_offsets(np.array([len(sample.spans) for sample in samples], np.int32)), values)


def _offsets(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]))
