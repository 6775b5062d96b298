"""Errors on a full disk name the file system and its free space."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fuligo.errors import FuligoError
from fuligo.formats.disk import default_mode, free_space, writing
from tests.small_disk import SmallDisk


def test_the_room_is_that_of_the_file_system_that_has_or_would_have_the_path(small_disk: SmallDisk) -> None:
    (small_disk.path / "run").mkdir()
    for path in (small_disk.path, small_disk.path / "run", small_disk.path / "not" / "there" / "yet"):
        assert free_space(path) == f"4 of 4 MiB are free on the file system {small_disk.path}"
    small_disk.fill()
    assert free_space(small_disk.path) == f"0 of 4 MiB are free on the file system {small_disk.path}"


def test_a_file_or_a_tree_that_does_not_fit_is_named_with_the_file_system(small_disk: SmallDisk, tmp_path: Path) -> None:
    small_disk.fill()
    file, copy, tree = small_disk.path / "file", small_disk.path / "copy", tmp_path / "tree"
    tree.mkdir()
    (tree / "weights").write_bytes(bytes(10_000))
    full = rf"cannot write .*(file|copy): .*No space left on device.* \(0 of 4 MiB are free on .* {small_disk.path}\).*free some space"
    with pytest.raises(FuligoError, match=full), writing(file):
        file.write_bytes(b"more")
    with pytest.raises(FuligoError, match=full), writing(copy):
        shutil.copytree(tree, copy, dirs_exist_ok=True)


def test_a_path_that_cannot_be_written_needs_no_space(tmp_path: Path) -> None:
    file = tmp_path / "absent" / "file"
    with pytest.raises(FuligoError, match=r"No such file or directory .* make the path writable, then resume"), writing(file):
        file.write_bytes(b"more")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_default_mode_is_that_of_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    os.umask(mask)
    file = tmp_path / "model.safetensors"
    with default_mode(file):
        save_file({"a": np.zeros(2)}, file)
    assert file.stat().st_mode & 0o777 == mode
