"""File format of groups: rollouts saved for debugging, and the partial-rollout buffer of a checkpoint. Parquet and JSON, no pickle.

One row per sample, group after group. Arrays are stored exactly. Prompt, label, metadata and reward are JSON: dicts with string keys,
lists, strings, numbers, booleans and None.
"""

from __future__ import annotations

import io
import itertools
import json
from base64 import b64decode, b64encode
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fuligo.errors import DataError, RolloutError
from fuligo.formats.disk import writing
from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.types import Branch, Episode, PromptImage, Sample, SampleGroup, SampleStatus, Span, ToolUse, Turn

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
META_KEY = b"fuligo"
ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "loss_mask": np.int8, "engine_logprobs": np.float32, "versions": np.int32}
JSON_FIELDS = ("prompt", "label", "metadata", "reward", "metrics")
PLAIN_FIELDS = ("index", "group_index", "status", "finish_reason", "error", "judge_error", "response")


def encode_groups(groups: list[SampleGroup]) -> bytes:
    """Encode groups as a parquet file in memory. Raises RolloutError if one of a sample's `JSON_FIELDS` is not JSON data."""
    return _to_bytes(_table(groups, {"format": FORMAT}))


def decode_groups(data: bytes) -> list[SampleGroup]:
    """Decode groups that `encode_groups` encoded. Raises DataError if `data` is in another format or format version."""
    return _groups(*_read(data, "the buffer of unfinished groups"))


def save_rollout(template: str, rollout: Rollout) -> Path:
    """Write a rollout with its state to the path `template`, with `{rollout_id}` replaced by the step, and return the path.

    Raises RolloutError like `encode_groups`, and FuligoError if the file cannot be written.
    """
    path = Path(template.replace("{rollout_id}", str(rollout.step)))
    state = rollout.state
    meta = {
        "format": FORMAT,
        "step": rollout.step,
        "metrics": rollout.metrics,
        "source": state.source,
        "next_sample_index": state.next_sample_index,
        "next_group_index": state.next_group_index,
        "num_groups": len(rollout.groups),
    }
    data = _to_bytes(_table([*rollout.groups, *state.buffer], meta))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return path


def load_rollout(template: str, step: int, *, vocab_size: int | None = None) -> Rollout:
    """Load the rollout that `save_rollout` wrote for this step.

    Raises DataError if the file cannot be read, or has token ids outside the trained model's vocabulary (`vocab_size`; None: unknown).
    """
    path = Path(template.replace("{rollout_id}", str(step)))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read --load-debug-rollout-data {path} for rollout {step}: {error.strerror}; use files of --save-debug-rollout-data"
        ) from error
    table, meta = _read(data, str(path), "; use a file of --save-debug-rollout-data")
    if "step" not in meta:
        raise DataError(f"--load-debug-rollout-data: {path} holds groups, not a rollout; use a file of --save-debug-rollout-data")
    groups = _groups(table, meta)
    last = max((int(sample.tokens.max()) for group in groups for sample in group.samples if len(sample.tokens)), default=0)
    if vocab_size is not None and last >= vocab_size:
        raise DataError(
            f"--load-debug-rollout-data: {path} has the token id {last}, but --hf-checkpoint has {vocab_size} tokens; "
            "the file belongs to another model; use a rollout of this model"
        )
    kept, buffer = groups[: meta["num_groups"]], groups[meta["num_groups"] :]
    state = RolloutState(meta["source"], meta["next_sample_index"], meta["next_group_index"], buffer)
    return Rollout(step, kept, state, meta["metrics"])


def _table(groups: list[SampleGroup], meta: dict[str, Any]) -> pa.Table:
    import pyarrow as pa

    rows = [(position, group, sample) for position, group in enumerate(groups) for sample in group.samples]
    samples = [sample for _, _, sample in rows]
    columns: dict[str, pa.Array] = {
        "position": pa.array([position for position, _, _ in rows], pa.int64()),
        "group": pa.array([group.index for _, group, _ in rows], pa.int64()),
        "row": pa.array([group.row for _, group, _ in rows], pa.int64()),
        "kept": pa.array([group.kept for _, group, _ in rows], pa.bool_()),
        "drop_reason": pa.array([group.drop_reason for _, group, _ in rows], pa.string()),
        "spans": pa.array([json.dumps([astuple(span) for span in sample.spans]) for sample in samples], pa.string()),
    }
    for name in PLAIN_FIELDS:
        columns[name] = pa.array([getattr(sample, name) for sample in samples], pa.int64() if name.endswith("index") else pa.string())
    for name in JSON_FIELDS:
        columns[name] = pa.array([_json(sample, name) for sample in samples], pa.string())
    columns["routed_experts"] = pa.array([_npy(sample.routed_experts) for sample in samples], pa.large_binary())
    columns["teacher_logprobs"] = pa.array([sample.teacher_logprobs for sample in samples], pa.list_(pa.float32()))
    texts, numbers = ("source", "digest"), ("first_token", "num_rows", "num_columns")
    fields = [*((name, pa.string()) for name in texts), ("data", pa.large_binary()), *((name, pa.int64()) for name in numbers)]
    columns["images"] = pa.array([[asdict(image) for image in sample.images] for sample in samples], pa.list_(pa.struct(fields)))
    columns["episode"] = pa.array(
        [None if sample.episode is None else json.dumps(asdict(sample.episode), default=_base64_npy) for sample in samples], pa.string()
    )
    for name, dtype in ARRAYS.items():
        columns[name] = pa.array([getattr(sample, name) for sample in samples], pa.list_(pa.from_numpy_dtype(dtype)))
    return pa.table(columns).replace_schema_metadata({META_KEY: json.dumps(meta).encode()})


def _npy(array: np.ndarray | None) -> bytes | None:
    """Encode an array for which parquet has no column type; None stays None."""
    if array is None:
        return None
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()


def _json(sample: Sample, name: str) -> str:
    try:
        return json.dumps(getattr(sample, name), default=_plain)
    except (TypeError, ValueError) as error:
        raise RolloutError(f"cannot save the {name} of sample {sample.index}: {error}; hooks must set only JSON data") from error


def _base64_npy(value: Any) -> str:
    return b64encode(_npy(value) or b"").decode()


def _episode(text: str | None) -> Episode | None:
    if text is None:
        return None
    fields = json.loads(text)
    turns = [Turn(**(turn | {"tools": [ToolUse(**use) for use in turn["tools"]]})) for turn in fields.pop("turns")]
    branches = []
    for branch in fields.pop("branches"):
        arrays: dict[str, Any] = {name: data and np.load(io.BytesIO(b64decode(data)), allow_pickle=False) for name, data in branch.items()}
        branches.append(Branch(**arrays))
    return Episode(**fields, turns=turns, branches=branches)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON data")


def _to_bytes(table: pa.Table) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _read(data: bytes, name: str, fix: str = "") -> tuple[pa.Table, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data))
        meta = json.loads((table.schema.metadata or {})[META_KEY])
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise DataError(f"cannot read {name}: it is not a rollout file written by fuligo ({type(error).__name__}: {error}){fix}") from error
    if meta["format"] != FORMAT:
        raise DataError(
            f"cannot read {name}: it has format {meta['format']}, but this version of fuligo reads format {FORMAT}; use the version that "
            "wrote it"
        )
    return table, meta


def _groups(table: pa.Table, meta: dict[str, Any]) -> list[SampleGroup]:
    columns = {name: table.column(name).to_pylist() for name in table.column_names if name not in ARRAYS}
    arrays = {name: [scalar.values.to_numpy(zero_copy_only=False) for scalar in table.column(name)] for name in ARRAYS}
    rows = [{name: values[row] for name, values in (columns | arrays).items()} for row in range(table.num_rows)]
    groups = []
    for _, members in itertools.groupby(rows, key=lambda row: row["position"]):
        first, *rest = members
        samples = [_sample(row) for row in (first, *rest)]
        groups.append(SampleGroup(first["group"], first["row"], samples, first["kept"], first["drop_reason"]))
    return groups


def _sample(row: dict[str, Any]) -> Sample:
    fields = {name: row[name] for name in PLAIN_FIELDS} | {name: json.loads(row[name]) for name in JSON_FIELDS}
    fields |= {name: np.array(row[name], dtype) for name, dtype in ARRAYS.items()}
    routed = row["routed_experts"]
    fields["routed_experts"] = None if routed is None else np.load(io.BytesIO(routed), allow_pickle=False)
    teacher = row["teacher_logprobs"]
    fields["teacher_logprobs"] = None if teacher is None else np.array(teacher, np.float32)
    fields["images"] = tuple(PromptImage(**image) for image in row["images"])
    fields["episode"] = _episode(row["episode"])
    fields["status"] = SampleStatus(row["status"])
    fields["spans"] = [Span(*span) for span in json.loads(row["spans"])]
    return Sample(**fields)
