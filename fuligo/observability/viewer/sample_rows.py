"""Single rows of sample files, read by row group; texts of samples in lists; statistics of prompts."""

from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Row = dict[str, Any]
LINE_COLUMNS = ["prompt", "response", "label", "finish_reason", "drop_reason", "error"]
"""Columns read for a line of the list, in addition to the index."""
UNREADABLE = (OSError, pa.ArrowException, ValueError, TypeError, KeyError, AttributeError)
"""Errors of a file that is gone or damaged, or holds something other than what a run writes."""
MAX_ROWS = 2**20
MAX_BYTES = 2**32
MAX_GROUP_BYTES = 2**28
"""Largest uncompressed row group that is read: twice the largest that a run writes, unless a single row is larger."""
MAX_CHARACTERS = 2**20
"""Maximum number of characters of one text that are shown."""
MAX_TEXT = 300
"""Largest number of characters of a text in a list; longer ones are cut."""


def number(value: Any) -> float | None:
    """Round a number to the five digits that pages show; return None if it is missing or not finite."""
    return float(f"{value:.5g}") if value is not None and np.isfinite(value) else None


def read_rows(path: Path, rows: Sequence[int], columns: Iterable[str] | None = None) -> list[Row]:
    """Return rows of a file in the given order, reading only their row groups. Rows that the file does not have are left out.

    Raises:
        OSError, pa.ArrowException: the file is gone or damaged.
    """
    state = path.stat()
    version = (state.st_mtime_ns, state.st_size)
    names = None if columns is None else tuple(columns)
    found: dict[int, Row] = {}
    start = 0
    for group, num_rows in enumerate(_group_sizes(path, version)):
        if wanted := sorted({row - start for row in rows if start <= row < start + num_rows}):
            table = _row_group(path, version, group, names).take(pa.array(wanted))
            found.update(zip([start + row for row in wanted], table.to_pylist(), strict=True))
        start += num_rows
    return [found[row] for row in rows if row in found]


@lru_cache(maxsize=256)
def _group_sizes(path: Path, version: tuple[int, int]) -> list[int]:
    metadata = pq.read_metadata(path)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


@lru_cache(maxsize=4)  # few, because long responses take megabytes
def _row_group(path: Path, version: tuple[int, int], group: int, names: tuple[str, ...] | None) -> pa.Table:
    """Read a row group; cached, because users open the samples of a prompt one after the other, and most are in one row group."""
    with pq.ParquetFile(path) as file:
        check_size(file.metadata, names, group)
        present = [name for name in names if name in file.schema_arrow.names] if names is not None else None
        table = file.read_row_group(group, columns=present, use_threads=False)
    for at, name in enumerate(table.column_names):
        if pa.types.is_string(table.schema.field(at).type) or pa.types.is_large_string(table.schema.field(at).type):
            table = table.set_column(at, name, pc.call_function("utf8_slice_codeunits", [table[name]], pc.SliceOptions(0, MAX_CHARACTERS)))
    return table


def check_size(metadata: pq.FileMetaData, names: Container[str] | None, group: int | None = None) -> None:
    """Check that columns fit into memory once they are uncompressed. Raises ArrowInvalid above the limits, which no run reaches.

    Args:
        names: columns that are read; None reads all.
        group: row group that is read; None reads all.
    """
    if metadata.num_rows > MAX_ROWS:
        raise pa.ArrowInvalid(f"the file has {metadata.num_rows:,} samples; at most {MAX_ROWS:,} are read")
    most = MAX_BYTES if group is None else MAX_GROUP_BYTES
    read = [metadata.row_group(number) for number in (range(metadata.num_row_groups) if group is None else [group])]
    columns = [each.column(at) for each in read for at in range(each.num_columns)]
    size = sum(each.total_uncompressed_size for each in columns if names is None or each.path_in_schema.partition(".")[0] in names)
    if size > most:
        raise pa.ArrowInvalid(f"the columns have {size:,} bytes uncompressed; at most {most:,} are read at once")


def message_texts(prompt: str | None) -> list[tuple[str, str]]:
    """Return the role and text of each chat message; a prompt that is plain text has the role "prompt"."""
    try:
        messages = orjson.loads(prompt or "")
    except orjson.JSONDecodeError:
        messages = None
    if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message for message in messages) or not messages:
        return [("prompt", prompt or "")]
    return [(str(message["role"]), _content(message)) for message in messages]


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = content if isinstance(content, str) else "" if content is None else orjson.dumps(content).decode()
    return text + (f"\n{orjson.dumps(calls).decode()}" if calls else "")


def short(text: str | None) -> str:
    """Return the text as one line of at most `MAX_TEXT` characters; empty for None."""
    line = " ".join((text or "")[: 4 * MAX_TEXT].split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def short_prompt(prompt: str | None) -> str:
    """Return the last message, in which prompts usually differ, as one line."""
    return short(message_texts(prompt)[-1][1])


PromptOrder = Literal["pass_rate", "-pass_rate", "change", "-change", "num_samples", "-num_samples"]


def prompt_table(index: pa.Table, order: PromptOrder) -> pa.Table:
    """Return one row per dataset and prompt with rewards, sorted by `order`, then by key, so that pages of the list do not overlap.

    Columns: `prompt` (key), `dataset` (null in training), `num_samples` (with a reward), `num_steps`, `pass_rate` (null where no sample
    of the dataset passes), `mean` (reward), `first` and `last` (mean reward of the first and last step), `change` (last - first),
    `newest` and `row` (step and row of one of its newest samples).
    """
    judged = index.filter(pc.field("reward").is_valid() & ~pc.field("reward").is_nan())
    judged = judged.set_column(judged.column_names.index("passed"), "passed", judged["passed"].fill_null(False).cast(pa.float64()))
    steps = judged.group_by(["prompt", "dataset", "step"], use_threads=False).aggregate(
        [("reward", "mean"), ("passed", "mean"), ("row", "min"), ("row", "count")]
    )
    steps = steps.sort_by([("prompt", "ascending"), ("dataset", "ascending"), ("step", "ascending")])
    prompts, datasets = steps["prompt"].to_numpy(), steps["dataset"].fill_null("").to_numpy()
    is_new = np.r_[True, (prompts[1:] != prompts[:-1]) | (datasets[1:] != datasets[:-1])]
    starts = np.flatnonzero(is_new) if len(prompts) else np.empty(0, np.int64)
    ends = np.r_[starts[1:], len(prompts)].astype(np.int64) - 1
    counts, rewards, passed = (steps[name].to_numpy().astype(np.float64) for name in ("row_count", "reward_mean", "passed_mean"))
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    weighted = [np.add.reduceat(values * counts, starts) / totals if len(starts) else totals for values in (passed, rewards)]
    table = pa.table(
        {
            "prompt": prompts[starts] if len(starts) else pa.array([], pa.int64()),
            "dataset": steps["dataset"].take(pa.array(starts)),
            "num_samples": totals.astype(np.int64),
            "num_steps": ends - starts + 1,
            "pass_rate": _where_any_passes(weighted[0], datasets[starts]),
            "mean": weighted[1],
            "first": rewards[starts],
            "last": rewards[ends] if len(starts) else rewards,
            "change": (rewards[ends] - rewards[starts]) if len(starts) else rewards,
            "newest": steps["step"].to_numpy()[ends] if len(starts) else pa.array([], pa.int32()),
            "row": steps["row_min"].to_numpy()[ends] if len(starts) else pa.array([], pa.int32()),
        }
    )
    name, direction = order.removeprefix("-"), "descending" if order.startswith("-") else "ascending"
    by_mean = [("mean", direction)] if name == "pass_rate" else []
    return table.sort_by([(name, direction), *by_mean, ("prompt", "ascending"), ("dataset", "ascending")])


def _where_any_passes(pass_rates: np.ndarray, datasets: np.ndarray) -> pa.Array:
    """Return the pass rates, null in datasets where nothing passes: with shaped rewards right answers may stay below 1."""
    passing = set(datasets[pass_rates > 0].tolist())
    return pa.array(pass_rates, pa.float64(), mask=np.array([name not in passing for name in datasets.tolist()], bool))


def rewards_by_step(index: pa.Table) -> dict[tuple[int, str | None], list[tuple[int, float]]]:
    """Return (step, mean reward) of each prompt and dataset, oldest first."""
    means = index.group_by(["prompt", "dataset", "step"], use_threads=False).aggregate([("reward", "mean")]).sort_by("step")
    found: dict[tuple[int, str | None], list[tuple[int, float]]] = {}
    for row in means.to_pylist():
        points = found.setdefault((row["prompt"], row["dataset"]), [])
        if row["reward_mean"] is not None and np.isfinite(row["reward_mean"]):
            points.append((row["step"], round(row["reward_mean"], 4)))
    return found
