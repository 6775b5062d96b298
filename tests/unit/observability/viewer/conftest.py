from pathlib import Path

import pytest

from fuligo.observability.viewer.run import RunReader
from tests.unit.observability.viewer.recorded_run import write_run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recorded run, which tests do not change."""
    return write_run(tmp_path_factory.mktemp("viewer") / "recorded")


@pytest.fixture
def run(recorded: Path) -> RunReader:
    """Return a reader that has read the whole recorded run."""
    reader = RunReader(recorded, "recorded")
    reader.update_metrics()
    while reader.update_rest(float("inf")):
        pass
    return reader
