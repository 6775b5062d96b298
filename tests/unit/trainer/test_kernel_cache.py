"""Compiled kernels are code that the trainer runs: their cache is never one that another user can write."""

import os
from pathlib import Path

import pytest

from fuligo.trainer.ranks.world import kernel_cache


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_kept_in_the_users_home(home: Path) -> None:
    assert kernel_cache() == kernel_cache() == home / "fuligo" / "kernels"
    assert kernel_cache().stat().st_mode & 0o777 == 0o700


def test_a_cache_that_others_can_write_is_not_used(home: Path) -> None:
    kernel_cache().chmod(0o777)
    assert_private(kernel_cache(), home)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a directory to another user")
def test_a_cache_of_another_user_is_not_used(home: Path) -> None:
    os.chown(kernel_cache(), 65534, 65534)
    assert_private(kernel_cache(), home)


def test_without_a_home_the_cache_lasts_for_the_run(home: Path) -> None:
    home.write_text("a file")
    assert_private(kernel_cache(), home)


def assert_private(directory: Path, home: Path) -> None:
    assert home not in directory.parents and directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()
