"""Scripts written by a test, and the jobs that they start."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fuligo.importer.run import ImportedScript, UnavailableError, import_script

Import = Callable[..., ImportedScript]


@functools.cache
def sandbox_problem() -> str | None:
    """Return why no sandbox can be built on this machine, None where one can."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "run.sh")
        script.write_text("python3 train.py")
        try:
            import_script(script)
        except UnavailableError as error:
            return error.reason
    return None


@pytest.fixture
def sandbox() -> None:
    if (problem := sandbox_problem()) is not None:
        pytest.skip(f"no sandbox on this machine: {problem}")


@pytest.fixture
def imported(tmp_path: Path, sandbox: None) -> Import:
    """Write a script and import it: `imported(text, BASE_DIR="/shared")`; further files by `files={name: text}`."""

    def write_and_import(
        text: str, *, files: dict[str, str] | None = None, arguments: tuple[str, ...] = (), seconds: float = 20, **variables: str
    ) -> ImportedScript:
        for name, content in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        script = tmp_path / "run.sh"
        script.write_text(text)
        return import_script(script, arguments, given=variables, seconds=seconds)

    return write_and_import
