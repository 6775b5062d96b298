"""Last lines of a complete run on the console."""

from pathlib import Path

import pytest

from fuligo.config.command_line import parse
from fuligo.job import show_end


@pytest.mark.parametrize(
    ("flags", "saves"),
    [
        ("", True),
        ("--no-save-last", False),
        ("--no-save-last --save-interval 3", True),
        ("--no-save-last --save-interval 4", False),
        ("--no-save-last --debug-rollout-only", True),
    ],
)
def test_a_run_that_saves_nothing_says_so(flags: str, capsys: pytest.CaptureFixture[str], *, saves: bool) -> None:
    """But not a run that trains nothing."""
    show_end(parse(["--num-rollout", "3", *flags.split()]).config, Path("runs/first"))
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "run directory: runs/first"
    assert [line.startswith("no checkpoint saved: --no-save-last") for line in others] == ([] if saves else [True])
