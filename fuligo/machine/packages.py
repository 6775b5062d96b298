"""Packages that are installed for this interpreter or another, and the directory of temporary files; imports none of the packages."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

IMPORT_TIMEOUT_S = 60.0
_VERSIONS = """
import importlib.metadata, json, sys
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
ROOM_BYTES = 4096
"""Size of the file that is written as a test: a full file system still creates empty files."""


def package_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions(
    packages: Sequence[str], python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Return versions of packages for an interpreter, with `environment` added to this process's; all None if it fails to run."""
    if Path(python) == Path(sys.executable) and not environment:
        return {package: package_version(package) for package in packages}
    try:
        command = [python, "-c", _VERSIONS, *packages]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=True, env={**os.environ, **(environment or {})}
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return dict.fromkeys(packages)


def temporary_problem() -> str | None:
    """Return why temporary files cannot be written; None if they can.

    Python would silently take another directory for a TMPDIR that it cannot use, in the end the working directory; compilers would fail.
    """
    chosen = os.environ.get("TMPDIR")
    if not chosen:
        try:
            tempfile.gettempdir()
        except FileNotFoundError as error:  # lists the directories that were tried
            return f"cannot write temporary files: {error.strerror}; free space there, or set TMPDIR to a writable directory"
        return None
    try:
        with tempfile.TemporaryFile(dir=Path(chosen).absolute(), buffering=0) as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        cause = error.strerror or str(error)
        return f"cannot use TMPDIR {chosen}: {cause}; create it, free space there, or set TMPDIR to another directory"
    return None
