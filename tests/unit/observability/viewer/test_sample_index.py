"""Index of samples over new, changed, removed and damaged files."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from fuligo.observability.viewer import sample_index
from fuligo.observability.viewer.sample_index import SampleIndex, read_index_table
from tests.unit.observability.viewer.recorded_run import NUM_STEPS


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_update_reads_newest_files_first_within_its_budget(recorded: Path) -> None:
    index = SampleIndex(recorded)
    index.update(0.0)
    assert index.progress == (1, NUM_STEPS)
    assert set(index.table()["step"].to_pylist()) == {NUM_STEPS - 1}
    assert index.update() and not index.update()
    assert index.progress == (NUM_STEPS, NUM_STEPS)


def test_a_file_is_read_once(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = sample_index.read_index_table
    monkeypatch.setattr(sample_index, "read_index_table", lambda path, step: read.append(step) or original(path, step))
    index = SampleIndex(recorded)
    for _ in range(3):
        index.update()
        index.table()
    assert sorted(read) == list(range(NUM_STEPS))


def test_update_follows_changed_and_removed_files(copy: Path) -> None:
    index = SampleIndex(copy)
    index.update()
    files = sorted((copy / "samples").iterdir())
    files[-1].unlink()
    pq.write_table(pq.read_table(files[0]).slice(0, 3), files[0])
    index.update()
    steps = index.table()["step"].to_pylist()
    assert steps.count(0) == 3
    assert NUM_STEPS - 1 not in steps


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"no parquet at all" * 10])
def test_a_damaged_file_is_reported_and_the_others_are_read(copy: Path, damage: bytes) -> None:
    (copy / "samples" / "rollout_000004.parquet").write_bytes(damage)
    index = SampleIndex(copy)
    index.update()
    assert list(index.damaged) == [4]
    assert index.table().num_rows == 16 * (NUM_STEPS - 1)


def test_a_file_of_another_version_is_indexed_as_far_as_possible(copy: Path) -> None:
    table = pa.table({"index": [7, 8], "response": ["a", "b"], "new column": [1, 2]})
    pq.write_table(table, copy / "samples" / "rollout_000099.parquet")
    index = SampleIndex(copy)
    index.update()
    last = index.table().filter(pc.field("step") == 99)
    assert last["index"].to_pylist() == [7, 8]
    assert last["length"].to_pylist() == [None, None]
    assert last["kept"].to_pylist() == [True, True]


def test_index_reads_no_text_and_no_tokens(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Dataset:
        def __init__(self, path: Path, format: str) -> None:
            self._dataset = ds.dataset(path, format=format)

        def get_fragments(self) -> list["Fragment"]:
            return [Fragment(fragment) for fragment in self._dataset.get_fragments()]

    class Fragment:
        def __init__(self, fragment: ds.Fragment) -> None:
            self._fragment = fragment

        def __getattr__(self, name: str) -> Any:
            return getattr(self._fragment, name)

        def to_table(self, columns: list[str], **given: Any) -> pa.Table:
            read.extend(columns)
            return self._fragment.to_table(columns=columns, **given)

    monkeypatch.setattr(sample_index, "ds", SimpleNamespace(dataset=Dataset))
    read_index_table(recorded / "samples" / "rollout_000004.parquet", 4)
    assert sorted(read) == [
        *("advantage_mean", "engine", "group_index", "index", "kept"),
        *("oldest_version", "parts", "passed", "prompt_key", "response_length", "reward", "status"),
    ]


def test_samples_of_evaluations_have_an_index_of_their_own(recorded: Path) -> None:
    index = SampleIndex(recorded, "eval")
    index.update()
    table = index.table()
    assert set(table["step"].to_pylist()) == {0, NUM_STEPS}
    assert table.num_rows == 2 * 2 * 4
    of_set = table.filter(pc.field("dataset") == "long_sums")
    assert of_set.num_rows == 8
    assert pc.mean(of_set.filter(pc.field("step") == NUM_STEPS)["reward"]).as_py() == 0.75
    assert index.file(NUM_STEPS) == recorded / "eval" / f"eval_{NUM_STEPS:06d}.parquet"


def test_links_are_not_followed(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.parquet"
    (copy / "samples" / "rollout_000003.parquet").rename(secret)
    (copy / "samples" / "rollout_000003.parquet").symlink_to(secret)
    index = SampleIndex(copy)
    index.update()
    assert 3 not in index.table()["step"].to_pylist()
    assert index.file(3) is None


def test_unfinished_files_are_not_read(copy: Path) -> None:
    (copy / "samples" / ".rollout_000099.parquet.tmp").write_bytes(b"half")
    index = SampleIndex(copy)
    index.update()
    assert not index.damaged
