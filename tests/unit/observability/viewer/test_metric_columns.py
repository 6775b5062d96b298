"""Columns of metrics equal the records, whichever keys appear or disappear."""

from pathlib import Path

import orjson
import pytest

from fuligo.observability.viewer.metric_columns import MetricColumns


def written(path: Path, *records: object) -> MetricColumns:
    with path.open("ab") as file:
        for record in records:
            file.write(orjson.dumps(record) + b"\n")
    columns = MetricColumns(path)
    columns.update()
    return columns


def test_keys_that_come_and_go(tmp_path: Path) -> None:
    columns = written(tmp_path / "m", {"step": 0, "a": 1.0}, {"step": 1, "b": 2}, {"step": 2, "a": None, "b": 3})
    assert columns.steps == [0, 1, 2]
    assert columns.column("a") == [1.0, None, None]
    assert columns.column("b") == [None, 2, 3]
    assert columns.column("unknown") == [None, None, None]
    assert columns.latest("a") is None
    assert columns.latest("b") == 3


def test_six_digits_are_kept_and_times_are_exact_to_a_hundredth(tmp_path: Path) -> None:
    columns = written(tmp_path / "m", {"step": 0, "a": 0.123456789, "time": 1795238009.31325})
    assert columns.column("a") == [0.123457]
    assert columns.column("time") == [1795238009.31]


@pytest.mark.parametrize(
    "damage", [b'{"step": 1, "a"\n', b"[1]\n", b'{"a": 3}\n', b"\xff\xfe\n", b'{"step": "one"}\n', b'{"step": true}\n']
)
def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step":0,"a":1}\n' + damage + b'{"step":2,"a":2}\n')
    columns = MetricColumns(path)
    columns.update()
    assert columns.steps == [0, 2]
    assert columns.num_damaged == 1


def test_a_resumed_run_takes_rows_back(tmp_path: Path) -> None:
    path = tmp_path / "m"
    columns = written(path, *({"step": step, "a": step} for step in range(4)))
    path.write_bytes(b'{"step":0,"a":0}\n{"step":1,"a":10}\n')
    columns.update()
    assert columns.column("a") == [0, 10]
    assert columns.generation == 1


def test_tokens_add_up(tmp_path: Path) -> None:
    columns = written(tmp_path / "m", {"step": 0, "rollout/num_tokens": 5}, {"step": 1}, {"step": 2, "rollout/num_tokens": 2})
    assert columns.tokens() == [5, 5, 7]


def test_a_step_is_found_by_its_number(tmp_path: Path) -> None:
    columns = written(tmp_path / "m", {"step": 3}, {"step": 4})
    assert [columns.row_of_step(step) for step in (3, 4, 5)] == [0, 1, None]
