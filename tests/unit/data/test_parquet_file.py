"""Random access to parquet."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuligo.data import parquet_file
from fuligo.data.row_file import open_rows
from fuligo.errors import DataError

MESSAGES = [{"role": "user", "content": "how many?", "tool_calls": None}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": MESSAGES, "label": str(row), "unread": "x" * 100} for row in range(95)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    return path


def test_any_row_can_be_read_in_any_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_CACHE_BYTES", 1)  # one row group at a time
    file = open_rows(path, ["prompt", "label"])
    assert len(file) == 95
    rows = list(range(95))
    random.Random(0).shuffle(rows)
    for row in rows:
        assert file[row] == {"prompt": MESSAGES, "label": str(row)}
    assert file.place(12) == f"{path}, row 13"


def test_a_missing_column_is_named_with_those_present(path: Path) -> None:
    with pytest.raises(DataError, match="no column 'input'; it has prompt, label, unread"):
        open_rows(path, ["input", "label"])


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text('{"prompt": "jsonl under a wrong name"}\n')
    with pytest.raises(DataError, match="is not a parquet file"):
        open_rows(path, ["prompt"])
