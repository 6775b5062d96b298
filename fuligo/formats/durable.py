"""Writes that outlast a crash: on disk before they are named, named by an atomic rename."""

from __future__ import annotations

import os
from pathlib import Path


def sync_tree(directory: Path) -> None:
    """Bring every file and directory below `directory`, and itself, to disk."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    """Bring a file's content, or a directory's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_text(path: Path, text: str) -> None:
    """Give a small file a new content at one stroke."""
    unfinished = path.with_name(f".tmp_{path.name}")
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.replace(path)
    sync(path.parent)
