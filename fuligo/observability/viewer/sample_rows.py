"""Reading samples whole: single rows of one file, by its row groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
LINE_COLUMNS = ["prompt", "response", "label", "finish_reason", "drop_reason", "error"]
"""Read for a line of the list, beside what the index knows."""
MAX_TEXT = 300
"""Characters of a text in a list."""


def read_rows(path: Path, rows: Sequence[int], columns: Iterable[str] | None = None) -> list[Row]:
    """In the order asked for; only their row groups are read. Rows that the file does not have are left out.

    Raises:
        OSError, pa.ArrowException: the file is gone or damaged.
    """
    with pq.ParquetFile(path) as file:
        names = [name for name in columns if name in file.schema_arrow.names] if columns is not None else None
        found: dict[int, Row] = {}
        start = 0
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            wanted = sorted({row - start for row in rows if start <= row < end})
            if wanted:
                table = file.read_row_group(group, columns=names, use_threads=False).take(pa.array(wanted))
                found.update(zip([start + row for row in wanted], table.to_pylist(), strict=True))
            start = end
    return [found[row] for row in rows if row in found]


def message_texts(prompt: str | None) -> list[tuple[str, str]]:
    """Role and text of each chat message; a prompt that is plain text has the role "prompt"."""
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
    """One line for a list."""
    line = " ".join((text or "")[: 4 * MAX_TEXT].split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def short_prompt(prompt: str | None) -> str:
    """What was asked last: that is where prompts differ."""
    return short(message_texts(prompt)[-1][1])
