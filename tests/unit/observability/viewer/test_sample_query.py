"""Filters, orders and search find what a plain loop over all rows finds."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.sample_columns import prompt_hash
from fuligo.observability.viewer.sample_query import Order, SampleFilter, TextSearch, matching, ordered
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, STALE_FROM


@pytest.fixture(scope="module")
def rows(recorded: Path) -> list[dict]:
    """Every row of every file, with the step and row that it stands in."""
    found = []
    for step in range(NUM_STEPS):
        table = pq.read_table(recorded / "samples" / f"rollout_{step:06d}.parquet").to_pylist()
        newest = max(version for row in table for version in row["versions"])
        found += [{**row, "step": step, "row": at, "newest": newest} for at, row in enumerate(table)]
    return found


CASES = [
    (SampleFilter(), lambda row: True),
    (SampleFilter(step_min=3, step_max=5), lambda row: 3 <= row["step"] <= 5),
    (SampleFilter(reward_min=0.5), lambda row: row["reward"] is not None and row["reward"] >= 0.5),
    (SampleFilter(reward_max=0.0), lambda row: row["reward"] is not None and row["reward"] <= 0.0),
    (SampleFilter(length_min=21, length_max=21), lambda row: len(row["response_ids"]) == 21),
    (SampleFilter(advantage_max=-0.1), lambda row: row["advantages"] is not None and np.mean(row["advantages"]) <= -0.1),
    (SampleFilter(staleness_min=1), lambda row: row["newest"] - min(row["versions"]) >= 1),
    (SampleFilter(status="failed"), lambda row: row["status"] == "failed"),
    (SampleFilter(status="nonsense"), lambda row: False),
    (SampleFilter(kept=False), lambda row: not row["kept"]),
    (SampleFilter(group=10), lambda row: row["group_index"] == 10),
    (SampleFilter(prompt=prompt_hash('[{"role":"user","content":"Add 5 and 6."}]')), lambda row: "Add 5 and 6." in row["prompt"]),
]


@pytest.mark.parametrize(("wanted", "oracle"), CASES)
def test_filters(run: RunReader, rows: list[dict], wanted: SampleFilter, oracle) -> None:
    columns = run.samples.columns()
    expected = [row["index"] for row in rows if oracle(row)]
    assert columns.index[matching(columns, wanted)].tolist() == expected


@pytest.mark.parametrize("order", ["reward", "-reward", "length", "-length", "advantage", "-advantage", "-staleness"])
def test_orders(run: RunReader, order: Order) -> None:
    columns = run.samples.columns()
    positions = ordered(columns, matching(columns, SampleFilter()), order)
    values = getattr(columns, order.removeprefix("-"))[positions].astype(float)
    known = values[np.isfinite(values)]
    assert sorted(positions.tolist()) == list(range(len(columns)))
    assert np.all(np.diff(known) <= 0) if order.startswith("-") else np.all(np.diff(known) >= 0)
    assert np.isfinite(values[: len(known)]).all(), "what has no value comes last"


def test_newest_first_in_the_order_of_the_file(run: RunReader) -> None:
    columns = run.samples.columns()
    positions = ordered(columns, matching(columns, SampleFilter()), "newest")
    places = list(zip(columns.step[positions].tolist(), columns.row[positions].tolist(), strict=True))
    assert places == sorted(places, key=lambda place: (-place[0], place[1]))


@pytest.mark.parametrize("text", ["row 11<", "ADD 70", "</script>", "nowhere", "}", '"', "\u2028"])
def test_search(run: RunReader, rows: list[dict], text: str) -> None:
    columns = run.samples.columns()
    search = TextSearch(columns, matching(columns, SampleFilter(step_min=2)), text, run.samples.file)
    while not search.done:
        search.go_on(0.0)
    expected = [row["index"] for row in rows if row["step"] >= 2 and text.lower() in f"{row['prompt']}\n{row['response']}".lower()]
    assert sorted(columns.index[search.found].tolist()) == expected


def test_a_search_reads_one_file_where_there_is_no_time(run: RunReader) -> None:
    columns = run.samples.columns()
    search = TextSearch(columns, matching(columns, SampleFilter()), "row", run.samples.file)
    search.go_on(0.0)
    assert search.share_done == pytest.approx(1 / NUM_STEPS)
    assert set(columns.step[search.found].tolist()) == {NUM_STEPS - 1}, "the newest first"


def test_staleness_is_counted_from_the_newest_version_of_the_step(run: RunReader) -> None:
    columns = run.samples.columns()
    assert set(columns.step[columns.staleness == 1].tolist()) == set(range(STALE_FROM, NUM_STEPS))
    assert columns.staleness.max() == 1
