"""Checks of prompt files before a run: which rows are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuligo.config.groups import DataFlags
from fuligo.data import check
from fuligo.data.check import check_file
from fuligo.data.source import PromptOrder
from fuligo.errors import DataError

Write = Callable[..., Path]
NUM_ROWS = 30


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_rows(bad: int, row: dict[str, Any]) -> Path:
        path = tmp_path / "rows.jsonl"
        rows = [row if number == bad else {"input": f"q{number}", "label": "1"} for number in range(NUM_ROWS)]
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return path

    return write_rows


NULL = {"input": "q", "label": None}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (NULL, "'label' (--label-key) is null"),
        ({"input": "q"}, "no key 'label'"),
        ({"input": "", "label": "1"}, "'input' is an empty string"),
    ],
    ids=["null label", "no label", "empty prompt"],
)
def test_a_bad_row_that_the_run_draws_is_found_before_it_starts(write: Write, row: dict[str, Any], problem: str) -> None:
    path = write(20, row)
    with pytest.raises(DataError) as raised:
        check_file(path, DataFlags(label_key="label"))
    assert f"{path}, line 21: {problem}" in str(raised.value)
    assert check_file(path, DataFlags(label_key="label", skip_bad_rows=True)) == NUM_ROWS


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_that_the_run_does_not_draw_may_be_bad(write: Write, *, shuffle: bool) -> None:
    settings = DataFlags(label_key="label", rollout_shuffle=shuffle, rollout_seed=3)
    order = PromptOrder([NUM_ROWS], shuffle=shuffle, seed=3)
    drawn = [order.next() for _ in range(NUM_ROWS)]
    place = next(place for place, row in enumerate(drawn) if place >= 10 and row >= 8)  # the first 8 rows are always read
    path = write(drawn[place], NULL)
    assert check_file(path, settings, num_drawn=place) == NUM_ROWS
    for num_drawn in (place + 1, NUM_ROWS + 5, None):
        with pytest.raises(DataError, match=f"line {drawn[place] + 1}: .* is null"):
            check_file(path, settings, num_drawn)


def test_rows_far_behind_are_not_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROWS_READ", 20)
    assert check_file(write(20, NULL), DataFlags(label_key="label")) == NUM_ROWS
    with pytest.raises(DataError, match="line 20: "):
        check_file(write(19, NULL), DataFlags(label_key="label"))


def test_weights_of_other_entries_do_not_matter_where_all_rows_are_drawn(write: Write) -> None:
    """An evaluation set has the flags of --prompt-data, which may have more entries."""
    with pytest.raises(DataError, match="line 21: "):
        check_file(write(20, NULL), DataFlags(label_key="label", prompt_data_weights=[0.5, 2.0]))
