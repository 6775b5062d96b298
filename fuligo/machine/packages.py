"""Versions of packages that are installed for this interpreter or another; imports none of them."""

import importlib.metadata
import json
import os
import subprocess
import sys
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


def package_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions(
    packages: Sequence[str], python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Return the versions of several packages for an interpreter; all None if the interpreter fails to run.

    Args:
        python: path of the interpreter; default: this process's.
        environment: variables to add to this process's environment, such as PYTHONPATH.
    """
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
