"""Compiled kernels are code that a run executes: their cache is never a directory that another user can write or replace."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.formats.private import kept_directory, kernel_cache, private_directory

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives a directory to another user")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home that others can read, as /home/name often is."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def open_parents(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let other users reach the directories of these tests: pytest closes them, which would protect what lies below."""
    base = tmp_path_factory.getbasetemp()
    for directory in (base, *base.parents):
        if directory.name.startswith(("pytest-", "popen-")) and directory.stat().st_uid == os.getuid():
            directory.chmod(0o755)


def test_the_cache_is_kept_in_the_users_home(home: Path) -> None:
    assert kernel_cache() == kernel_cache() == home / "fuligo" / "kernels"
    assert kernel_cache().stat().st_mode & 0o777 == 0o700


def test_a_cache_whose_parent_others_can_write_is_not_used(home: Path) -> None:
    """They could put another directory in its place after it was checked."""
    place = home / "fuligo"
    place.mkdir(parents=True)
    place.chmod(0o777)
    assert_temporary(kernel_cache(), home)
    place.chmod(0o1777)  # like /tmp: others cannot rename what is ours
    assert kernel_cache() == place / "kernels"


def test_a_cache_that_others_can_write_is_not_used(home: Path) -> None:
    kernel_cache().chmod(0o777)
    assert_temporary(kernel_cache(), home)


def test_a_directory_in_a_closed_one_is_out_of_reach(home: Path) -> None:
    """Groups of one's own, and a umask of 002, leave group-writable directories in a home that is closed."""
    kernel_cache().chmod(0o775)
    home.chmod(0o700)
    assert kernel_cache() == home / "fuligo" / "kernels"


@needs_root
def test_a_cache_of_another_user_is_not_used(home: Path) -> None:
    os.chown(kernel_cache(), NOBODY, NOBODY)
    assert_temporary(kernel_cache(), home)


@needs_root
def test_a_link_of_another_user_leads_nowhere(home: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    os.chown(foreign, NOBODY, NOBODY)
    (home / "fuligo").mkdir(parents=True)
    (home / "fuligo" / "kernels").symlink_to(foreign)
    assert_temporary(kernel_cache(), home)


def test_without_a_home_the_cache_lasts_for_the_run(home: Path) -> None:
    home.write_text("a file")
    assert_temporary(kernel_cache(), home)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from fuligo.formats.private import kept_directory
assert kept_directory(Path("/dev/null/none"), "fuligo-test-").parent == Path({str(tmp_path)!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("fuligo-test-*"))) == 1
    with private_directory("fuligo-test-", tmp_path) as own:
        assert list(tmp_path.glob("fuligo-test-*")) == [own]


def assert_temporary(directory: Path, home: Path) -> None:
    assert home not in directory.parents and directory.stat().st_mode & 0o777 == 0o700
    assert kept_directory(directory, "unused-") == directory, "it is itself out of reach"
