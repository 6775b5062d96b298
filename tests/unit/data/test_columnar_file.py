"""Random access to parquet, Arrow and CSV."""

import csv
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from fuligo.data import columnar_file
from fuligo.data.locate import locate
from fuligo.data.row_file import open_rows
from fuligo.errors import DataError

MESSAGES = [{"role": "user", "content": "how many?", "tool_calls": None}]


def _write(path: Path, table: pa.Table) -> None:
    """Write in groups of ten rows."""
    match path.name:
        case "rows.parquet":
            pq.write_table(table, path, row_group_size=10)
        case "file.arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table, max_chunksize=10)
        case "stream.arrow":
            with pa.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table, max_chunksize=10)


@pytest.fixture(params=["rows.parquet", "file.arrow", "stream.arrow"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rows = [{"prompt": MESSAGES, "label": str(row), "unread": "x" * 100} for row in range(95)]
    _write(tmp_path / request.param, pa.Table.from_pylist(rows))
    return tmp_path / request.param


def test_any_row_can_be_read_in_any_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar_file, "_CACHE_BYTES", 1)  # one row group at a time
    file = open_rows(path, ["prompt", "label"])
    assert len(file) == 95
    rows = list(range(95))
    random.Random(0).shuffle(rows)
    for row in rows:
        assert file[row] == {"prompt": MESSAGES, "label": str(row)}
    assert file.place(12) == f"{path}, row 13"


def test_a_missing_column_is_named_with_those_present(path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'input'; .* prompt, label, unread"):
        open_rows(path, ["input", "label"])


@pytest.mark.parametrize(("separator", "shown"), [(";", "';'"), ("\t", r"'\\t'"), ("|", r"'\|'")])
def test_a_csv_file_with_another_separator_is_refused_with_the_separator(tmp_path: Path, separator: str, shown: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"input{separator}label\n1 + 1{separator}2\n")
    with pytest.raises(DataError, match=f"no column 'input', 'label'; .* with commas instead of {shown}"):
        open_rows(path, ["input", "label"])


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_file_of_another_format_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text('{"prompt": "jsonl under a wrong name"}\n')
    with pytest.raises(DataError, match=f"is not an? {suffix}".replace("arrow", "Arrow")):
        open_rows(path, ["prompt"])


def test_a_stream_with_dictionaries_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "stream.arrow", pa.table({"prompt": pa.array(["a", "b"]).dictionary_encode()}))
    with pytest.raises(DataError, match="dictionary-encoded"):
        open_rows(tmp_path / "stream.arrow", ["prompt"])


def test_csv_values_are_text_and_empty_ones_null(tmp_path: Path) -> None:
    """Also with a byte-order mark, quotes, and lines inside a value; the oracle is the csv module's writer."""
    path = tmp_path / "rows.csv"
    rows = [["007", 'two\nlines, "quoted"'], ["1.50", "é"], ["", "no label"]]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["label", "input"], *rows])
    read = open_rows(path, ["input", "label"])
    assert [read[row] for row in range(3)] == [{"input": text, "label": label or None} for label, text in rows]
    path.write_text("input\na,b\n")
    with pytest.raises(DataError, match=r"is not a CSV file \(.*Expected 1 columns, got 2"):
        open_rows(path, ["input"])


def test_the_library_reads_the_same_rows_from_its_folder(tmp_path: Path) -> None:
    saved = Dataset.from_list([{"prompt": MESSAGES, "label": row} for row in range(25)])
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    files = [open_rows(file, ["prompt", "label"]) for file in locate(str(tmp_path / "saved"))]
    assert len(files) == 3
    assert [file[row] for file in files for row in range(len(file))] == saved.to_list()
