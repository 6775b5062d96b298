"""The first thing that a newcomer runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.command import succeed

LAST_LINE = re.compile(r"reward (\d\.\d\d) -> (\d\.\d\d) in [\d.]+ s \((.*)\)")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))])
def test_a_tiny_model_learns_to_add(seed: int, tmp_path: Path) -> None:
    output = succeed("quickstart", "--seed", seed, "--run-dir", tmp_path / "run")
    found = LAST_LINE.fullmatch(output.rstrip("\n").splitlines()[-1])
    assert found, output
    start, end, run_dir = found.groups()
    assert float(start) <= 0.50
    assert float(end) >= 0.90
    assert run_dir == str(tmp_path / "run")
    assert f"report       {tmp_path / 'run' / 'report.html'}" in output
    assert "fuligo report</title>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
