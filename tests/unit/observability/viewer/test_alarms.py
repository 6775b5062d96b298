"""Alarms ring for what is wrong, and name the step; ordinary runs are silent."""

from pathlib import Path

import numpy as np
import orjson
import pytest

from fuligo.observability.viewer.alarms import Alarm, alarms, stretches
from fuligo.observability.viewer.metric_columns import MetricColumns
from fuligo.observability.viewer.mismatch import VersionMismatch, explanation, mismatch_by_version
from fuligo.observability.viewer.run import RunReader
from tests.unit.observability.viewer.recorded_run import STALE_DIFF, STALE_FROM, USUAL_DIFF


def of(tmp_path: Path, key: str, values: list[float | None]) -> list[Alarm]:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"step": step, key: value}) + b"\n" for step, value in enumerate(values)))
    columns = MetricColumns(path)
    columns.update()
    return alarms(columns)


USUAL = [0.01] * 10


@pytest.mark.parametrize(
    ("key", "values", "title"),
    [
        ("train/logprob_abs_diff", [*USUAL, 0.2, 0.2], "Engine and trainer disagree since step 10"),
        ("train/logprob_abs_diff", [0.5, 0.5], "Engine and trainer disagree since step 0"),
        ("train/logprob_abs_diff", [*USUAL, 0.2, *USUAL], "Engine and trainer disagree in step 10"),
        ("train/logprob_abs_diff", [*USUAL, 0.2, 0.01, 0.2, *USUAL], "Engine and trainer disagree in steps 10 to 12"),
        ("train/clip_fraction", [*USUAL, 0.5, 0.5, 0.5], "Much of the update is clipped since step 10"),
        ("train/kl", [*USUAL, 0.5, 0.6, 0.7], "The policy runs away from its reference since step 10"),
        ("train/entropy", [*[0.5] * 10, *[0.01] * 3], "Entropy has collapsed since step 10"),
        ("train/grad_norm", [*[1.0] * 10, 50.0], "The gradient jumps in step 10"),
        ("train/grad_norm", [1.0, 1.0, None], "train/grad_norm is not a number in step 2"),
        ("rollout/truncated_ratio", [0.1, 0.5, 0.5, 0.5], "Many answers are cut off since step 1"),
        ("rollout/num_failed", [0, 0, 2, 0, 0], "Samples failed in step 2"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, key: str, values: list[float | None], title: str) -> None:
    found = of(tmp_path, key, values)
    assert [alarm.title for alarm in found] == [title]
    assert found[0].key == key


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("train/logprob_abs_diff", [0.005, 0.02, 0.008, 0.025]),
        ("train/logprob_abs_diff", []),
        ("train/clip_fraction", [*USUAL, 0.5, 0.01]),
        ("train/entropy", np.linspace(0.5, 0.2, 50).tolist()),
        ("train/grad_norm", (1 + 0.5 * np.sin(np.arange(100))).tolist()),
        ("train/kl", np.linspace(0, 0.09, 50).tolist()),
        ("rollout/num_failed", [0, 0, 0]),
    ],
)
def test_ordinary_runs_are_silent(tmp_path: Path, key: str, values: list[float]) -> None:
    assert of(tmp_path, key, values) == []


def test_earlier_times_are_counted(tmp_path: Path) -> None:
    found = of(tmp_path, "train/logprob_abs_diff", [*USUAL, 0.2, *USUAL, 0.3, *USUAL, 0.4])
    assert "It happened twice before." in found[0].text
    assert found[0].first_step == 32


def test_stretches_bridge_a_single_good_row() -> None:
    bad = [False, True, True, False, True, False, False, True]
    assert [(stretch.first, stretch.last) for stretch in stretches(bad)] == [(1, 4), (7, 7)]
    assert [(stretch.first, stretch.last) for stretch in stretches(bad, lasting=3)] == [(1, 4)]


def test_the_disagreement_of_a_stale_version_is_measured(run: RunReader) -> None:
    path = run.samples.file(STALE_FROM)
    assert path is not None
    old, new = mismatch_by_version(path)
    assert (old.version, new.version) == (STALE_FROM - 1, STALE_FROM)
    assert old.abs_diff == pytest.approx(STALE_DIFF, rel=1e-4)
    assert new.abs_diff == pytest.approx(USUAL_DIFF, rel=1e-3)


def test_the_alarm_names_the_stale_version(run: RunReader) -> None:
    alarm = run.alarms()[0]
    assert alarm.title == f"Engine and trainer disagree since step {STALE_FROM}"
    assert f"an engine still served version {STALE_FROM - 1} while others had {STALE_FROM}" in alarm.text


@pytest.mark.parametrize(
    ("by_version", "expected", "words"),
    [
        ([VersionMismatch(3, 10, 0.2)], 4, "the engines were not updated"),
        ([VersionMismatch(4, 10, 0.2)], 4, "precision, sampling parameters or routing"),
        ([VersionMismatch(3, 10, 0.2), VersionMismatch(4, 10, 0.25)], 4, "differ alike"),
        ([VersionMismatch(3, 10, 0.01), VersionMismatch(4, 10, 0.25)], 4, "the newest weights are wrong"),
        ([VersionMismatch(3, 10, 0.5), VersionMismatch(4, 30, 0.01)], 4, "the 25% of tokens that version 3 sampled"),
    ],
)
def test_the_cause_of_a_disagreement(by_version: list[VersionMismatch], expected: int, words: str) -> None:
    assert words in (explanation(7, by_version, expected) or "")


def test_no_tokens_no_cause() -> None:
    assert explanation(7, [], None) is None
