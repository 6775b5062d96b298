"""The example notebook, cell by cell in one event loop as a kernel runs them, with fewer rollouts."""

import ast
import inspect
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python" / "train.ipynb"
FEWER = {"num_rollout=12": "num_rollout=2", "eval_interval=4": "eval_interval=1", "iter_0000012": "iter_0000002"}


async def test_every_cell_of_the_notebook_runs(
    warm_children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        needs_matplotlib = "plot" in cell["metadata"].get("tags", [])
        if cell["cell_type"] != "code" or (needs_matplotlib and find_spec("matplotlib") is None):
            continue
        source = "".join(cell["source"])
        for text, fewer in FEWER.items():
            source = source.replace(text, fewer)
        result = eval(compile(source, cell["id"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(result):
            await result
    shown = capsys.readouterr().out
    assert "after 2 rollouts: " in shown and "config.json" in shown
    assert len(names["steps"]) == 2
