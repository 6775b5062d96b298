"""Scripts written by a test, and what they would start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fuligo.importer import ImportedScript, import_script

Import = Callable[..., ImportedScript]


@pytest.fixture
def imported(tmp_path: Path) -> Import:
    """Write a script, evaluate it: `imported(text, BASE_DIR="/shared")`; further files by `files={name: text}`."""

    def write_and_import(
        text: str, *, files: dict[str, str] | None = None, arguments: tuple[str, ...] = (), **variables: str
    ) -> ImportedScript:
        for name, content in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        script = tmp_path / "run.sh"
        script.write_text(text)
        return import_script(script, arguments, given=variables)

    return write_and_import
