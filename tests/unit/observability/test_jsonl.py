"""Files of JSON lines: torn last lines are removed, other damage is reported."""

from pathlib import Path

import pytest

from fuligo.errors import ConfigError
from fuligo.observability.jsonl import JsonLines, read_json_lines


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    file = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(4):
        file.append({"step": step, "value": step / 3})
    return file


def test_records_come_back_bit_for_bit(lines: JsonLines) -> None:
    assert read_json_lines(lines.path) == [{"step": step, "value": step / 3} for step in range(4)]


def test_values_that_are_not_finite_become_null(lines: JsonLines) -> None:
    lines.append({"step": 4, "value": float("nan")})
    assert read_json_lines(lines.path)[-1] == {"step": 4, "value": None}


@pytest.mark.parametrize("num_bytes", [1, 5, 20])
def test_a_torn_last_line_is_removed_when_the_file_is_continued(lines: JsonLines, num_bytes: int) -> None:
    data = lines.path.read_bytes()
    lines.path.write_bytes(data[:-num_bytes])
    continued = JsonLines(lines.path)
    continued.append({"step": 3, "value": "again"})
    assert [record["value"] for record in read_json_lines(lines.path)] == [0, 1 / 3, 2 / 3, "again"]


def test_reader_skips_the_line_that_is_being_written(lines: JsonLines) -> None:
    with lines.path.open("ab") as file:
        file.write(b'{"step": 4, "val')
    assert [record["step"] for record in read_json_lines(lines.path)] == [0, 1, 2, 3]


def test_cut_back_drops_the_first_record_not_kept_and_all_after_it(lines: JsonLines) -> None:
    lines.cut_back(lambda record: record["step"] < 2)
    lines.append({"step": 2, "value": 0})
    assert [record["step"] for record in read_json_lines(lines.path)] == [0, 1, 2]


def test_a_damaged_line_in_the_middle_is_named(lines: JsonLines) -> None:
    good = lines.path.read_bytes().split(b"\n")
    lines.path.write_bytes(b"\n".join([good[0], b"\0\0\0", *good[2:]]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 2 is not JSON"):
        lines.cut_back(lambda record: True)
