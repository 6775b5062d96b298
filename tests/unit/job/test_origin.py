"""Origin of a run, and the recorded steps that it may replace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fuligo.config.command_line import parse
from fuligo.job.origin import Origin


def may_cut_back(origin: Origin, tmp_path: Path, *flags: object) -> bool:
    run_dir = tmp_path / "run"
    return origin.may_cut_back(parse(["--run-dir", str(run_dir), *map(str, flags)]).config, run_dir)


def test_recorded_steps_give_way_to_a_checkpoint_or_to_a_start_where_nothing_was_saved(tmp_path: Path) -> None:
    begins = Origin(0, 0, tmp_path / "model", None, None)
    resumes = replace(begins, step=4, checkpoint=tmp_path / "elsewhere" / "iter_0000004")
    assert may_cut_back(resumes, tmp_path, "--load", tmp_path / "elsewhere")
    assert may_cut_back(begins, tmp_path, "--load", tmp_path / "run" / "checkpoints"), "the run ended before its first checkpoint"
    assert may_cut_back(begins, tmp_path, "--load", tmp_path / "own", "--save", tmp_path / "own")


def test_recorded_steps_do_not_give_way_to_a_load_without_checkpoints(tmp_path: Path) -> None:
    begins = Origin(0, 0, tmp_path / "model", None, None)
    assert not may_cut_back(begins, tmp_path)
    assert not may_cut_back(begins, tmp_path, "--load", tmp_path / "run" / "chekpoints")
    assert not may_cut_back(begins, tmp_path, "--load", tmp_path / "model"), "weights alone"
