import tempfile
from pathlib import Path

import pytest

from fuligo.machine.packages import temporary_problem
from tests.small_disk import SmallDisk


def test_a_directory_that_can_be_written_to_has_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert temporary_problem() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["missing", "file", "/proc"])
def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TMPDIR", str(tmp_path / place))
    problem = temporary_problem()
    assert problem is not None and problem.startswith(f"cannot use TMPDIR {tmp_path / place}: ")


def test_a_full_file_system_is_named(small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files can still be created on it."""
    small_disk.fill()
    monkeypatch.setenv("TMPDIR", str(small_disk.path))
    problem = temporary_problem()
    assert problem is not None and "No space left on device; create it, free space there, or set TMPDIR" in problem


def test_without_tmpdir_one_of_the_usual_directories_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert temporary_problem() is None
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    assert temporary_problem() == (
        "cannot write temporary files: No usable temporary directory found in ['/proc']; free space there, or set TMPDIR to a "
        "writable directory"
    )
