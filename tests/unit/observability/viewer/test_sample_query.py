"""Filters, orders and search find what a plain loop over all rows finds."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from fuligo.observability.samples import prompt_key
from fuligo.observability.viewer import sample_query
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.sample_index import SampleIndex
from fuligo.observability.viewer.sample_query import Order, SampleFilter, TextSearch, matching, ordered
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, STALE_FROM, begin_run, groups_of


@pytest.fixture(scope="module")
def rows(recorded: Path) -> list[dict]:
    """Every row of every file, with the step and row that it stands in."""
    found = []
    for step in range(NUM_STEPS):
        table = pq.read_table(recorded / "samples" / f"rollout_{step:06d}.parquet").to_pylist()
        newest = max(version for row in table for version in row["versions"])
        found += [{**row, "step": step, "row": at, "newest": newest} for at, row in enumerate(table)]
    return found


EVERYTHING = SampleFilter()
CASES = [
    (EVERYTHING, lambda row: True),
    (SampleFilter(step_min=3, step_max=5), lambda row: 3 <= row["step"] <= 5),
    (SampleFilter(reward_min=0.5), lambda row: row["reward"] is not None and row["reward"] >= 0.5),
    (SampleFilter(reward_max=0.0), lambda row: row["reward"] is not None and row["reward"] <= 0.0),
    (SampleFilter(length_min=21, length_max=21), lambda row: len(row["response_ids"]) == 21),
    (SampleFilter(advantage_max=-0.1), lambda row: row["advantages"] is not None and np.mean(row["advantages"]) <= -0.1),
    (SampleFilter(staleness_min=1), lambda row: row["newest"] - min(row["versions"]) >= 1),
    (SampleFilter(status="failed"), lambda row: row["status"] == "failed"),
    (SampleFilter(status="nonsense"), lambda row: False),
    (SampleFilter(kept=False), lambda row: not row["kept"]),
    (SampleFilter(engine=1), lambda row: row["engine"] == 1),
    (SampleFilter(engine=-1), lambda row: row["engine"] is None),
    (SampleFilter(group=10), lambda row: row["group_index"] == 10),
    (SampleFilter(prompt=prompt_key('[{"role":"user","content":"Add 5 and 6."}]')), lambda row: "Add 5 and 6." in row["prompt"]),
]


@pytest.mark.parametrize(("wanted", "oracle"), CASES)
def test_filters(run: RunReader, rows: list[dict], wanted: SampleFilter, oracle) -> None:
    columns = run.samples.columns()
    expected = [row["index"] for row in rows if oracle(row)]
    assert columns.index[matching(columns, wanted)].tolist() == expected


@pytest.mark.parametrize("order", ["reward", "-reward", "length", "-length", "advantage", "-advantage", "-staleness", "engine"])
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
    search, share, found = TextSearch(text), 0.0, np.empty(0, np.int64)
    while share < 1:
        found, share = search.go_on(run.samples, columns, matching(columns, SampleFilter(step_min=2)), 0.0)
    expected = [row["index"] for row in rows if row["step"] >= 2 and text.lower() in f"{row['prompt']}\n{row['response']}".lower()]
    assert sorted(columns.index[found].tolist()) == expected


def test_a_search_reads_one_file_where_there_is_no_time(run: RunReader) -> None:
    columns = run.samples.columns()
    found, share = TextSearch("row").go_on(run.samples, columns, matching(columns, SampleFilter()), -1.0)
    assert share == pytest.approx(1 / NUM_STEPS)
    assert set(columns.step[found].tolist()) == {NUM_STEPS - 1}, "the newest first"


def test_a_search_goes_on_when_a_step_is_added_or_the_filter_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    original = sample_query.rows_with_text
    monkeypatch.setattr(sample_query, "rows_with_text", lambda path, text: searched.append(path.name) or original(path, text))
    live, index, search = begin_run(tmp_path / "run"), SampleIndex(tmp_path / "run"), TextSearch("row 1")

    def found(wanted: SampleFilter) -> int:
        index.update()
        columns = index.columns()
        return len(search.go_on(index, columns, matching(columns, wanted), 60.0)[0])

    for step in range(3):
        live.step(step)
    before = found(EVERYTHING)
    assert len(searched) == 3
    live.step(3)
    assert found(EVERYTHING) > before
    assert searched[3:] == ["rollout_000003.parquet"], "only the new step is searched"
    assert found(SampleFilter(engine=0)) == 4, "of each step row 1, and not rows 10 to 15"
    assert len(searched) == 4
    live.directory.write_samples(2, groups_of(2)[:1])
    assert found(EVERYTHING) < before + 4, "a file that was written anew is searched anew"
    assert searched[4:] == ["rollout_000002.parquet"]
    live.directory.close()


def test_staleness_is_counted_from_the_newest_version_of_the_step(run: RunReader) -> None:
    columns = run.samples.columns()
    assert set(columns.step[columns.staleness == 1].tolist()) == set(range(STALE_FROM, NUM_STEPS))
    assert columns.staleness.max() == 1
