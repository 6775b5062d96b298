"""Filters, orders and search find what a plain loop over all rows finds."""

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from fuligo.observability.samples import prompt_key
from fuligo.observability.viewer import sample_query
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.sample_index import SampleIndex
from fuligo.observability.viewer.sample_query import Order, SampleFilter, TextSearch, in_order, matching
from fuligo.types import Sample, SampleGroup
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, STALE_FROM, begin_run, groups_of


@pytest.fixture(scope="module")
def rows(recorded: Path) -> list[dict]:
    """Return every row of every file with its step and row."""
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
    (SampleFilter(group=10), lambda row: row["group_index"] == 10),
    (SampleFilter(prompt=prompt_key('[{"role":"user","content":"Add 5 and 6."}]')), lambda row: "Add 5 and 6." in row["prompt"]),
]


@pytest.mark.parametrize(("wanted", "oracle"), CASES)
def test_filters(run: RunReader, rows: list[dict], wanted: SampleFilter, oracle) -> None:
    expected = [row["index"] for row in rows if oracle(row)]
    assert matching(run.samples.table(), wanted)["index"].to_pylist() == expected


def test_filters_by_a_part_of_the_reward(tmp_path: Path) -> None:
    live = begin_run(tmp_path / "graded")
    rewards: list[float | dict] = [{"acc": 1.0, "format": 0.5}, {"acc": 0.0}, {"format": 0.25}, 1.0]
    samples = [Sample(at, 0, "p", np.ones(1, np.int32), reward=reward) for at, reward in enumerate(rewards)]
    live.directory.write_samples(0, [SampleGroup(0, 0, samples)], reward_key="acc")
    live.directory.close()
    index = SampleIndex(tmp_path / "graded")
    index.update()
    assert index.parts() == ["acc", "format"]

    def found(**given) -> list[int]:
        return matching(index.table(), SampleFilter(**given))["index"].to_pylist()

    assert (found(part="acc"), found(part="format"), found(part="other")) == ([0, 1], [0, 2], [])
    assert (found(part="acc", part_min=0.5), found(part="acc", part_max=0.5)) == ([0], [1])
    assert found(part="format", part_min=0.25, part_max=0.25) == [2]
    assert found(part_min=0.5) == [0, 1, 2, 3], "bounds alone name no part"


@pytest.mark.parametrize("order", ["reward", "-reward", "length", "-length", "advantage", "-advantage", "-staleness", "engine"])
def test_orders(run: RunReader, order: Order) -> None:
    table = run.samples.table()
    found = in_order(table, order, 0, table.num_rows)
    values = found[order.removeprefix("-")].to_pylist()
    known = [value for value in values if value is not None]
    assert sorted(found["index"].to_pylist()) == sorted(table["index"].to_pylist())
    assert known == sorted(known, reverse=order.startswith("-"))
    assert values[: len(known)] == known, "rows without a value come last"


@pytest.mark.parametrize("order", ["newest", "oldest", "reward", "-staleness"])
def test_pages_are_slices_of_the_whole_order(run: RunReader, order: Order) -> None:
    table = run.samples.table()
    whole = in_order(table, order, 0, table.num_rows)
    for offset in range(0, table.num_rows + 20, 37):
        assert in_order(table, order, offset, 37).equals(whole.slice(offset, 37))


def test_an_empty_index_has_empty_pages(run: RunReader) -> None:
    assert in_order(run.samples.table().slice(0, 0), "-reward", 0, 50).num_rows == 0


def test_newest_first_in_the_order_of_the_file(run: RunReader) -> None:
    found = in_order(run.samples.table(), "newest", 0, run.samples.table().num_rows)
    places = list(zip(found["step"].to_pylist(), found["row"].to_pylist(), strict=True))
    assert places == sorted(places, key=lambda place: (-place[0], place[1]))


@pytest.mark.parametrize("text", ["row 11<", "ADD 70", "</script>", "nowhere", "}", '"', "\u2028"])
def test_search(run: RunReader, rows: list[dict], text: str) -> None:
    search, share, found = TextSearch(text), 0.0, run.samples.table()
    while share < 1:
        found, share = search.advance(run.samples, matching(run.samples.table(), SampleFilter(step_min=2)), 0.0)
    expected = [row["index"] for row in rows if row["step"] >= 2 and text.lower() in f"{row['prompt']}\n{row['response']}".lower()]
    assert sorted(found["index"].to_pylist()) == expected


def test_a_search_without_time_reads_one_file(run: RunReader) -> None:
    found, share = TextSearch("row").advance(run.samples, run.samples.table(), -1.0)
    assert share == pytest.approx(1 / NUM_STEPS)
    assert set(found["step"].to_pylist()) == {NUM_STEPS - 1}, "newest first"


def test_a_search_continues_when_a_step_is_added_or_the_filter_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    original = sample_query.rows_with_text
    monkeypatch.setattr(sample_query, "rows_with_text", lambda path, text: searched.append(path.name) or original(path, text))
    live, index, search = begin_run(tmp_path / "run"), SampleIndex(tmp_path / "run"), TextSearch("row 1")

    def found(wanted: SampleFilter) -> int:
        index.update()
        return search.advance(index, matching(index.table(), wanted), 60.0)[0].num_rows

    for step in range(3):
        live.step(step)
    before = found(EVERYTHING)
    assert len(searched) == 3
    live.step(3)
    assert found(EVERYTHING) > before
    assert searched[3:] == ["rollout_000003.parquet"], "only the new step is searched"
    assert found(SampleFilter(engine=0)) == 4, "row 1 of each step, and not rows 10 to 15"
    assert len(searched) == 4
    live.directory.write_samples(2, groups_of(2)[:1])
    assert found(EVERYTHING) < before + 4, "a rewritten file is searched again"
    assert searched[4:] == ["rollout_000002.parquet"]
    live.directory.close()


def test_staleness_is_counted_from_the_newest_version_of_the_step(run: RunReader) -> None:
    table = run.samples.table()
    assert set(table.filter(pc.field("staleness") == 1)["step"].to_pylist()) == set(range(STALE_FROM, NUM_STEPS))
    assert pc.max(table["staleness"]).as_py() == 1
