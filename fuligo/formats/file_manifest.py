"""The list of a checkpoint's files with their sizes, so that one that was cut short is noticed before it is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from fuligo.errors import CheckpointError

MANIFEST = "manifest.json"
CHECKSUM_MAX_BYTES = 16 * 1024**2
"""Larger files are checked by size alone: reading them twice would double the time of a resume."""


def write_manifest(directory: Path) -> None:
    """List everything below `directory`."""
    files = {str(file.relative_to(directory)): _describe(file) for file in files_below(directory)}
    (directory / MANIFEST).write_bytes(orjson.dumps({"files": files}, option=orjson.OPT_INDENT_2))


def check_manifest(directory: Path) -> None:
    """Compare the files with the list.

    Raises:
        CheckpointError: names the first file that is missing, shorter or longer, or changed.
    """
    for name, listed in _read(directory).items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is incomplete; resume from another with --ckpt-step")
        size = file.stat().st_size
        if size != listed["bytes"]:
            raise CheckpointError(
                f"{file} has {size} bytes, {listed['bytes']} were written: the checkpoint is damaged; resume from another with --ckpt-step"
            )
        if _describe(file) != listed:
            raise CheckpointError(f"{file} is not what was written: the checkpoint is damaged; resume from another with --ckpt-step")


def files_below(directory: Path) -> list[Path]:
    """Every file at any depth, without the list itself."""
    return sorted(file for file in directory.rglob("*") if file.is_file() and file != directory / MANIFEST)


def _describe(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    checksum = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if size <= CHECKSUM_MAX_BYTES else None
    return {"bytes": size, "blake2b": checksum}


def _read(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / MANIFEST
    try:
        files = orjson.loads(path.read_bytes())["files"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it is no checkpoint of fuligo, or an incomplete one; choose another with --ckpt-step"
        ) from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise CheckpointError(f"{path} cannot be read: the checkpoint is damaged; resume from another with --ckpt-step") from None
    return files
