"""`fuligo serve`: a model path that is not a model names the one that was meant."""

from pathlib import Path

import pytest

from fuligo.cli.serve import main
from fuligo.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run with two checkpoints."""
    for iteration in (9, 10):
        weights = tmp_path / "run" / "checkpoints" / f"iter_{iteration:07d}" / "hf"
        weights.mkdir(parents=True)
        (weights / "config.json").write_text("{}")
    return tmp_path / "run"


@pytest.mark.parametrize("given", [".", "checkpoints", "checkpoints/iter_0000010"])
def test_a_run_is_answered_with_its_newest_weights(run: Path, given: str) -> None:
    newest = run / "checkpoints" / "iter_0000010" / "hf"
    with pytest.raises(ConfigError, match=f"there is no config.json; use {newest}$"):
        main(["--model-path", str(run / given)])


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config\.json; use a Hugging Face directory"):
        main(["--model-path", str(tmp_path)])
