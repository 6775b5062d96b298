"""A footer tells what it knows, and never more."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuligo.observability.viewer.sample_footer import Footer


def footer(path: Path, values: list[Any], *, statistics: bool = True) -> Footer:
    """Of a file with row groups of two."""
    pq.write_table(pa.table({"column": values}), path / "file.parquet", row_group_size=2, write_statistics=statistics)
    return Footer(pq.read_metadata(path / "file.parquet"))


@pytest.mark.parametrize(
    ("values", "constant"),
    [
        ([7, 7, 7], 7),
        ([0, 0], 0),
        ([False, False, False], False),
        (["completed"] * 5, "completed"),
        ([7, 7, 8], None),
        ([7, 8], None),
        ([7, None, 7], None),
        ([None, None], None),
        ([7, 7, None, None], None),
        ([1.0, float("nan"), 1.0], None),
        ([], None),
    ],
)
def test_what_all_rows_share(tmp_path: Path, values: list[Any], constant: Any) -> None:
    assert footer(tmp_path, values).constant("column") == constant
    assert footer(tmp_path, values, statistics=False).constant("column") is None
    assert footer(tmp_path, values).constant("another") is None


@pytest.mark.parametrize(("values", "greatest"), [([1, 9, 4], 9), ([None, None, 3], 3), ([None], None), ([], None)])
def test_the_greatest_value(tmp_path: Path, values: list[Any], greatest: int | None) -> None:
    assert footer(tmp_path, values).greatest("column") == greatest


def test_entries_of_lists(tmp_path: Path) -> None:
    assert footer(tmp_path, [[1, 2], [], [5]]).greatest("column.list.element") == 5
