"""Discovery and names of run directories."""

from pathlib import Path

import pytest

from fuligo.errors import ConfigError
from fuligo.observability.viewer.run_files import find_runs, run_names


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    return path


def test_a_run_or_a_directory_of_runs(tmp_path: Path) -> None:
    b, a = make(tmp_path / "runs" / "b"), make(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "notes").mkdir()
    assert find_runs([b]) == [b]
    assert find_runs([tmp_path / "runs"]) == [a, b]
    assert find_runs([b, tmp_path / "runs"]) == [b, a], "each once"


def test_names_are_short_and_different(tmp_path: Path) -> None:
    paths = [make(tmp_path / "one" / "seed1"), make(tmp_path / "two" / "seed1"), make(tmp_path / "two" / "seed2")]
    assert run_names(paths) == ["one/seed1", "two/seed1", "seed2"]


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_paths_without_a_run_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=name):
        find_runs([tmp_path / name])
