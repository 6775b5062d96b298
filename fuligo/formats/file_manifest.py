"""Manifest of a checkpoint's files and sizes, so that a truncated file is found before it is loaded."""

import hashlib
from pathlib import Path
from typing import Any

import orjson

from fuligo.errors import CheckpointError

MANIFEST = "manifest.json"
_FIX = "resume from another one with --ckpt-step"
CHECKSUM_MAX_BYTES = 16 * 1024**2
"""Larger files are checked by size only: reading them twice would double the time of a resume."""


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files below `directory`."""
    files = {str(file.relative_to(directory)): _describe(file) for file in files_below(directory)}
    (directory / MANIFEST).write_bytes(orjson.dumps({"files": files}, option=orjson.OPT_INDENT_2))


def check_manifest(directory: Path) -> None:
    """Compare the files with the manifest.

    Raises:
        CheckpointError: a file is missing or changed; the error names the first one.
    """
    for name, listed in _read(directory).items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"cannot load {directory}: {file} is missing; {_FIX}")
        size = file.stat().st_size
        if size != listed["bytes"]:
            raise CheckpointError(f"cannot load {directory}: {file} has {size} bytes, expected {listed['bytes']}; {_FIX}")
        if _describe(file) != listed:
            raise CheckpointError(f"cannot load {directory}: {file} does not match its checksum; {_FIX}")


def files_below(directory: Path) -> list[Path]:
    """Return all files below `directory` except the manifest, sorted."""
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
        raise CheckpointError(f"cannot load {directory}: it has no {MANIFEST}, so it is not a complete fuligo checkpoint; {_FIX}") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise CheckpointError(f"cannot read {path}: the checkpoint is damaged; {_FIX}") from None
    return files
