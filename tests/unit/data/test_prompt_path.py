"""`FILE@[a:b]` selects rows like a Python slice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.data.row_file import PromptPath
from fuligo.errors import DataError

bounds = st.none() | st.integers(-30, 30)


def spell(bound: int | None) -> str:
    return "" if bound is None else str(bound)


@settings(deadline=None)
@given(start=bounds, stop=bounds, num_rows=st.integers(1, 25))
def test_a_slice_selects_what_python_selects(start: int | None, stop: int | None, num_rows: int) -> None:
    parsed = PromptPath.parse(f"data/train.jsonl@[{spell(start)}:{spell(stop)}]")
    assert parsed.path == "data/train.jsonl"
    expected = list(range(num_rows))[start:stop]
    if expected:
        assert list(parsed.select(num_rows)) == expected
    else:
        with pytest.raises(DataError, match=rf"of its {num_rows} rows? is empty"):
            parsed.select(num_rows)


def test_without_a_slice_all_rows_are_taken() -> None:
    assert list(PromptPath.parse("a@b.jsonl").select(3)) == [0, 1, 2]


@pytest.mark.parametrize("text", ["f.jsonl@[1]", "f.jsonl@[1:2:3]", "f.jsonl@[a:b]", "f.jsonl@[]", "f.jsonl@[1.5:]"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="is not a slice of rows"):
        PromptPath.parse(text)
