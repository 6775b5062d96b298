"""Manifest checks: large files by size, small files by digest."""

from pathlib import Path

import pytest

from fuligo.errors import CheckpointError
from fuligo.formats import disk as manifest


def test_a_large_file_is_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "CHECKSUM_MAX_BYTES", 4)
    (tmp_path / "weights").write_bytes(b"12345")
    manifest.write_manifest(tmp_path)
    (tmp_path / "weights").write_bytes(b"67890")
    manifest.check_manifest(tmp_path)
    (tmp_path / "weights").write_bytes(b"678901")
    with pytest.raises(CheckpointError, match="weights has 6 bytes, expected 5"):
        manifest.check_manifest(tmp_path)


def test_files_at_any_depth_are_listed_once(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    manifest.write_manifest(tmp_path)
    manifest.write_manifest(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in manifest.files_below(tmp_path)] == ["a", "b/c", "b/d/e"]
    manifest.check_manifest(tmp_path)
