"""The index follows the files: new ones, changed ones, ones that are gone, damaged ones."""

import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuligo.observability.samples import prompt_key
from fuligo.observability.viewer import sample_index
from fuligo.observability.viewer.sample_columns import read_sample_columns
from fuligo.observability.viewer.sample_index import SampleIndex
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, STALE_FROM


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_newest_first_and_as_much_as_there_is_time_for(recorded: Path) -> None:
    index = SampleIndex(recorded)
    index.update(0.0)
    assert index.progress == (1, NUM_STEPS)
    assert set(index.columns().step.tolist()) == {NUM_STEPS - 1}
    assert index.update() and not index.update()
    assert index.progress == (NUM_STEPS, NUM_STEPS)


def test_a_file_is_read_once(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = sample_index.read_sample_columns
    monkeypatch.setattr(sample_index, "read_sample_columns", lambda path, step: read.append(step) or original(path, step))
    index = SampleIndex(recorded)
    for _ in range(3):
        index.update()
        index.columns()
    assert sorted(read) == list(range(NUM_STEPS))


def test_files_that_change_or_go(copy: Path) -> None:
    index = SampleIndex(copy)
    index.update()
    files = sorted((copy / "samples").iterdir())
    files[-1].unlink()
    pq.write_table(pq.read_table(files[0]).slice(0, 3), files[0])
    index.update()
    steps = index.columns().step.tolist()
    assert steps.count(0) == 3
    assert NUM_STEPS - 1 not in steps


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"no parquet at all" * 10])
def test_a_damaged_file_is_named_and_the_others_read(copy: Path, damage: bytes) -> None:
    (copy / "samples" / "rollout_000004.parquet").write_bytes(damage)
    index = SampleIndex(copy)
    index.update()
    assert list(index.damaged) == [4]
    assert len(index.columns()) == 16 * (NUM_STEPS - 1)


def test_a_file_of_another_version_shows_what_it_has(copy: Path) -> None:
    table = pa.table({"index": [7, 8], "response": ["a", "b"], "new column": [1, 2]})
    pq.write_table(table, copy / "samples" / "rollout_000099.parquet")
    index = SampleIndex(copy)
    index.update()
    columns = index.columns()
    last = columns.take(columns.step == 99)
    assert last.index.tolist() == [7, 8]
    assert last.length.tolist() == [0, 0]
    assert last.kept.all()


def test_files_without_columns_of_their_own_for_it_tell_the_same(recorded: Path, tmp_path: Path) -> None:
    path = recorded / "samples" / f"rollout_{STALE_FROM:06d}.parquet"
    added = ["response_length", "advantage_mean", "oldest_version", "prompt_key"]
    pq.write_table(pq.read_table(path).drop_columns(added), tmp_path / "older.parquet", write_statistics=False)
    now, then = read_sample_columns(path, 8), read_sample_columns(tmp_path / "older.parquet", 8)
    for field in fields(now):
        np.testing.assert_array_equal(getattr(now, field.name), getattr(then, field.name), err_msg=field.name)


def test_no_text_no_tokens_and_nothing_that_all_rows_share_is_read(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = pq.ParquetFile.read
    monkeypatch.setattr(pq.ParquetFile, "read", lambda file, names, **given: read.extend(names) or original(file, names, **given))
    columns = read_sample_columns(recorded / "samples" / "rollout_000004.parquet", 4)
    assert set(read) == {"index", "group_index", "reward", "engine", "response_length", "advantage_mean", "prompt_key"}
    assert columns.kept.all() and not columns.status.any() and not columns.staleness.any()


def test_samples_of_evaluations_are_an_index_of_their_own(recorded: Path) -> None:
    index = SampleIndex(recorded, "eval")
    index.update()
    columns = index.columns()
    assert np.unique(columns.step).tolist() == [0, NUM_STEPS]
    assert len(columns) == 2 * 2 * 4
    of_set = columns.take(columns.dataset == prompt_key("long_sums"))
    assert (len(of_set), of_set.reward[of_set.step == NUM_STEPS].mean()) == (8, 0.75)
    assert index.file(NUM_STEPS) == recorded / "eval" / f"eval_{NUM_STEPS:06d}.parquet"


def test_links_lead_nowhere(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.parquet"
    (copy / "samples" / "rollout_000003.parquet").rename(secret)
    (copy / "samples" / "rollout_000003.parquet").symlink_to(secret)
    index = SampleIndex(copy)
    index.update()
    assert 3 not in index.columns().step
    assert index.file(3) is None


def test_unfinished_files_are_not_read(copy: Path) -> None:
    (copy / "samples" / ".rollout_000099.parquet.tmp").write_bytes(b"half")
    index = SampleIndex(copy)
    index.update()
    assert not index.damaged
