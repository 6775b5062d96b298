"""Random access to jsonl: right rows, right line numbers in errors, bounded memory."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.data import row_file
from fuligo.data.row_file import JsonlFile
from fuligo.errors import DataError

ROW = st.dictionaries(st.text(max_size=3), st.text(max_size=10) | st.integers(), max_size=3)


@settings(deadline=None)
@given(
    rows=st.lists(ROW, max_size=12),
    num_blanks=st.integers(0, 4),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    last_newline=st.booleans(),
    chunk_bytes=st.integers(1, 64),
)
def test_rows_are_those_of_a_plain_reader(
    *, rows: list[dict], num_blanks: int, newline: bytes, last_newline: bool, chunk_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every kind of line end, empty lines, and chunk boundaries of the index."""
    lines = [json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in rows]
    for position in range(num_blanks):
        lines.insert(2 * position, b"")
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(newline.join(lines) + (newline if last_newline else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_file, "_CHUNK_BYTES", chunk_bytes)
        file = JsonlFile(path)
        assert [file[row] for row in range(len(file))] == rows
        expected_lines = [number for number, line in enumerate(lines, 1) if line.strip()]
        assert [file.place(row) for row in range(len(file))] == [f"{path}, line {number}" for number in expected_lines]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert [JsonlFile(path)[row] for row in (0, 1)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": 1', "not JSON (Expecting ',' delimiter at column 8); correct or remove the line"),
        ("[1, 2]", "a row must be a JSON object, not a list"),
        ("null", "not null"),
        ('"text"', "not a string"),
        ("[" * 100_000, "not JSON"),
        ('{"a": "\xff"}', "not UTF-8"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON that can be parsed (Exceeds the limit"),
        (r'{"a": ["cut \ud83d"]}', r"\ud83d is an unpaired surrogate"),
        (r'{"\uDE00": 1}', r"\ude00 is an unpaired surrogate"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0}\n\n{"a": 1}\n' + line.encode("latin-1") + b'\n{"a": 2}\n')
    file = JsonlFile(path)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 4") as raised:
        file[2]
    assert problem in str(raised.value)
    assert file[3] == {"a": 2}, "rows around it can still be read"


def test_an_array_over_many_lines_is_distinguished_from_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n  {"a": 1},\n  {"a": 2}\n]\n')
    with pytest.raises(DataError, match=r"rows\.json is one JSON array over several lines; write one object per line"):
        JsonlFile(path)[0]


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"a": "\ud83d\uDE00"}')
    assert JsonlFile(path)[0] == {"a": "\N{GRINNING FACE}"}


def test_a_million_rows_are_indexed_in_bounded_memory(tmp_path: Path) -> None:
    """A file of over 60 MB takes 8 bytes per row and some temporary chunks."""
    path = tmp_path / "million.jsonl"
    num_rows = 1_000_000
    with path.open("w") as out:
        for start in range(0, num_rows, 10_000):
            out.writelines(f'{{"input": "what is {row} plus {row}?", "label": "{2 * row}"}}\n' for row in range(start, start + 10_000))
    tracemalloc.start()
    try:
        file = JsonlFile(path)
        kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(file) == num_rows
    assert kept_bytes < 9 * num_rows
    assert peak_bytes < path.stat().st_size
    for row in (0, 1, 499_999, 777_777, num_rows - 1):
        assert file[row] == {"input": f"what is {row} plus {row}?", "label": str(2 * row)}
