"""Prompt files that other processes truncate, rewrite, replace or touch while they are read."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuligo.data.row_file import RowFile, open_rows
from fuligo.errors import DataChangedError, DataError

NUM_ROWS = 2000
CHANGED = r"cannot continue with .*rows\.\w+: its content changed while it was read \(.*\); restore the file and resume"


def rows(word: str) -> list[dict[str, str]]:
    return [{"input": f"{word} {row} " + f"{hash((word, row)):x}" * 8} for row in range(NUM_ROWS)]


def write(path: Path, word: str) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(word)))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows(word)), path, row_group_size=100)
    else:
        table = pa.Table.from_pylist(rows(word))
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=100)
    return path


@pytest.fixture(params=["jsonl", "parquet", "arrow"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / f"rows.{request.param}", "first")


@pytest.fixture
def file(path: Path) -> RowFile:
    return open_rows(path, ["input"])


@pytest.mark.parametrize("num_bytes", [0, 4096, 4097])
def test_a_truncated_file_is_named(path: Path, file: RowFile, num_bytes: int) -> None:
    """A mapped file would end the process by SIGBUS."""
    before = path.stat().st_size
    os.truncate(path, num_bytes)
    with pytest.raises(DataChangedError, match=CHANGED) as caught:
        file[NUM_ROWS - 1]
    assert f"({before:,} bytes before, {num_bytes:,} now)" in str(caught.value)


def test_a_file_rewritten_in_place_with_its_size_and_time_kept_is_named(path: Path, file: RowFile) -> None:
    file.content.digest()
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as handle:
        handle.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataChangedError, match=CHANGED) as caught:
        file[0]
    assert f"({before.st_size:,} bytes as before)" in str(caught.value)


def test_a_rewrite_before_the_digest_is_taken_is_named(path: Path, file: RowFile) -> None:
    write(path, "other")
    with pytest.raises(DataChangedError, match=CHANGED):
        file.content.digest()


def test_a_file_replaced_by_rename_or_deleted_is_read_to_its_end(path: Path, file: RowFile) -> None:
    file.content.digest()
    write(path.with_stem("new"), "other").rename(path)
    assert file[NUM_ROWS - 1] == rows("first")[-1]
    path.unlink()
    assert [file[row] for row in range(NUM_ROWS)] == rows("first")


def test_a_touched_and_extended_file_is_as_before(path: Path, file: RowFile) -> None:
    digest = file.content.digest()
    path.touch()
    path.chmod(0o640)
    assert file[0] == rows("first")[0]
    with path.open("ab") as handle:
        handle.write(b"more")
    assert [file[row] for row in range(NUM_ROWS)] == rows("first")
    assert file.content.digest() == digest


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"is not a regular file"):
        open_rows(tmp_path / "rows.jsonl", ["input"])
