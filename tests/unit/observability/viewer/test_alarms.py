"""Alarms: faults raise one with their step, ordinary runs raise none."""

from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from fuligo.observability.viewer.agreement import comparison
from fuligo.observability.viewer.alarms import Alarm, alarms, stretches
from fuligo.observability.viewer.metric_columns import MetricColumns
from fuligo.observability.viewer.mismatch import UNKNOWN, Mismatch, explanation, mismatches
from fuligo.observability.viewer.run import RunReader
from tests.unit.observability.viewer.recorded_run import STALE_DIFF, STALE_ENGINE, STALE_FROM, USUAL_DIFF, write_run


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
        ("train/kl", [*USUAL, 0.5, 0.6, 0.7], "KL to the reference is growing since step 10"),
        ("train/entropy", [*[0.5] * 10, *[0.01] * 3], "Entropy has collapsed since step 10"),
        ("train/grad_norm", [*[1.0] * 10, 50.0], "The gradient norm jumps in step 10"),
        ("train/grad_norm", [1.0, 1.0, None], "train/grad_norm is not a number in step 2"),
        ("rollout/truncated_ratio", [0.1, 0.5, 0.5, 0.5], "Many responses are truncated since step 1"),
        ("rollout/num_failed", [0, 0, 2, 0, 0], "Samples failed in step 2"),
    ],
)
def test_alarm_names_the_fault_and_its_step(tmp_path: Path, key: str, values: list[float | None], title: str) -> None:
    found = of(tmp_path, key, values)
    assert [alarm.title for alarm in found] == [title]
    assert found[0].key == key


def test_a_reward_of_almost_0_says_how_high_it_was(tmp_path: Path) -> None:
    (alarm,) = of(tmp_path, "rollout/reward_mean", [0.0, 0.0, 1 / 64, 0.0])
    assert alarm.title == "The reward is (almost) 0 since step 0"
    assert alarm.text.startswith("The mean reward of these steps is at most 0.016, so next to nothing is learned.")


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
def test_ordinary_runs_raise_no_alarm(tmp_path: Path, key: str, values: list[float]) -> None:
    assert of(tmp_path, key, values) == []


def rows(tmp_path: Path, **columns: list[float]) -> list[Alarm]:
    path = tmp_path / "metrics.jsonl"
    keys = [key.replace("__", "/") for key in columns]
    lines = [dict(zip(keys, values, strict=True)) | {"step": step} for step, values in enumerate(zip(*columns.values(), strict=True))]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    metrics = MetricColumns(path)
    metrics.update()
    return alarms(metrics)


@pytest.mark.parametrize(
    ("noise", "staleness", "difference", "is_alarm"),
    [
        (0.037, 0.0, 0.10, False),  # SmolLM2: 0.037 to 0.052 nats in ordinary runs
        (0.037, 0.0, 0.12, True),  # with FP8 0.16 to 0.18
        (0.09, 0.0, 0.2, False),  # experts: routing multiplies the noise
        (0.005, 0.0, 0.02, False),
        (0.005, 0.0, 0.04, True),
        (0.005, 1.0, 0.04, False),  # tokens of older versions differ by the updates since
        (0.005, 1.0, 0.11, True),
        (0.57, 0.0, 0.61, False),  # random weights
        (1.2, 0.0, 2.7, True),  # wrong weights, and a noise that cannot be right
    ],
)
def test_the_difference_is_compared_with_the_measured_noise(
    tmp_path: Path, noise: float, staleness: float, difference: float, is_alarm: bool
) -> None:
    """The noise is measured in the first step; the limit holds from there on."""
    keys = ("step", "rollout/staleness", "train/logprob_abs_diff")
    lines: list[dict[str, float]] = [dict(zip(keys, (step, staleness, difference), strict=True)) for step in range(3)]
    lines[0]["train/precision_noise"] = noise
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    metrics = MetricColumns(path)
    metrics.update()
    found = alarms(metrics)
    assert [alarm.title for alarm in found] == ["Engine and trainer disagree since step 0"] * is_alarm
    sentence = f"differ by {difference:.2g} nats; this model's own bf16 noise is {noise:.2g} nats. The alarm's limit is"
    assert sentence in str(comparison(metrics))
    if is_alarm:
        assert f"differ on average by up to {difference:.3g} nats. This model's own bf16 noise is {noise:.2g} nats; the" in found[0].text


def test_the_limit_is_fixed_without_a_measured_noise(tmp_path: Path) -> None:
    (alarm,) = of(tmp_path, "train/logprob_abs_diff", [0.09, 0.11])
    assert alarm.first_step == 1
    assert "The model's own precision noise was not measured, so the limit is fixed: 0.1 nats, or three times the" in alarm.text


@pytest.mark.parametrize(
    ("rewards", "equal", "is_alarm"),
    [
        ([0.3] * 10 + [1.0] * 5, [0.1] * 15, False),  # solved
        ([-2.0] * 10 + [7.5] * 5, [0.1] * 10 + [0.9] * 5, False),  # as high as it got, and all alike
        ([0.3] * 15, [0.1] * 10 + [0.9] * 5, True),  # all alike, and nothing learned
        ([0.3] * 10 + [0.5] * 5, [0.1] * 15, True),
    ],
)
def test_low_entropy_is_no_alarm_once_the_task_is_learned(tmp_path: Path, rewards: list[float], equal: list[float], is_alarm: bool) -> None:
    entropy = [0.5] * 10 + [0.01] * 5
    found = rows(tmp_path, train__entropy=entropy, rollout__reward_mean=rewards, rollout__zero_std_ratio=equal)
    assert ("train/entropy" in [alarm.key for alarm in found]) == is_alarm


SHRINKING = [119.0, 117.0, 110.0, 104.0, 96.0, 88.0, 71.0, 58.0, 49.0, 40.0, 18.0]


@pytest.mark.parametrize(
    ("lengths", "rewards", "truncated", "is_alarm"),
    [
        (SHRINKING, np.linspace(0.3, 0.98, 11).tolist(), 0.05, True),  # instructions that a short answer follows best
        ([20.2, 18.6, 14.3, 11.4, 10.7, 9.6, 9.5, 9.1, 8.9, 8.7, 8.4], np.linspace(-1.5, -0.8, 11).tolist(), 0.0, True),  # a penalty
        (SHRINKING, np.linspace(0.3, 0.98, 11).tolist(), 0.6, False),  # a base model that learns to stop
        (SHRINKING, [0.3] * 11, 0.05, False),  # nothing is gained by it
        ([100.0] * 3 + [55.0] * 8, np.linspace(0.3, 0.98, 11).tolist(), 0.0, False),  # somewhat more concise
        (SHRINKING[::-1], np.linspace(0.3, 0.98, 11).tolist(), 0.0, False),
    ],
)
def test_answers_that_shrink_while_the_reward_rises_raise_an_alarm(
    tmp_path: Path, lengths: list[float], rewards: list[float], truncated: float, is_alarm: bool
) -> None:
    found = rows(tmp_path, rollout__response_len_mean=lengths, rollout__reward_mean=rewards, rollout__truncated_ratio=[truncated] * 11)
    shrinking = [alarm for alarm in found if alarm.key == "rollout/response_len_mean"]
    assert bool(shrinking) == is_alarm
    if is_alarm:
        assert shrinking[0].title == "Responses have become short since step 7"
        assert "while the reward rose: the policy may be exploiting the reward" in shrinking[0].text


@pytest.mark.parametrize(
    ("rewards", "is_alarm"),
    [([0.5] * 8, True), ([0.0] * 8, False), ([1.0] * 8, False)],  # another alarm says that the reward is 0; 1 is learned
)
def test_rollouts_without_advantages_raise_an_alarm(tmp_path: Path, rewards: list[float], is_alarm: bool) -> None:
    found = rows(tmp_path, train__skipped_share=[0.5] * 5 + [1.0] * 3, rollout__reward_mean=rewards)
    titles = [alarm.title for alarm in found if alarm.key == "train/skipped_share"]
    assert titles == (["Nothing to train on since step 5"] if is_alarm else [])


def test_metrics_that_a_skipped_rollout_lacks_raise_no_alarm(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trained, skipped = {"train/loss": 0.1, "train/grad_norm": 1.0, "train/skipped_share": 0.5}, {"train/skipped_share": 1.0}
    broken = {**trained, "train/loss": None}
    for last, titles in ((skipped, []), (broken, ["train/loss is not a number in step 4"])):
        steps = [trained, skipped, trained, trained, last]
        path.write_bytes(b"".join(orjson.dumps({"step": step, **row}) + b"\n" for step, row in enumerate(steps)))
        metrics = MetricColumns(path)
        metrics.update()
        assert [alarm.title for alarm in alarms(metrics)] == titles


def test_requests_that_wait_for_memory_raise_an_alarm(tmp_path: Path) -> None:
    """Means of a run whose engine had found little free memory at its start, and of one whose first wave waited for prefill."""
    (alarm,) = rows(tmp_path, engine__num_running_mean=[105, 100, 109, 126], engine__num_waiting_mean=[677, 499, 595, 665])
    assert alarm.title == "Most requests wait in the engines since step 0" and alarm.text.startswith("Up to 677 requests wait")
    assert all(flag in alarm.text for flag in ("--sglang-mem-fraction-static", "--embedded-max-running-requests")), "of either engine"
    assert rows(tmp_path, engine__num_running_mean=[819, 297, 308, 402], engine__num_waiting_mean=[212, 0, 5, 0]) == []


def test_earlier_occurrences_are_counted(tmp_path: Path) -> None:
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
    old, new = mismatches(path)
    assert (old.version, old.engine, new.version, new.engine) == (STALE_FROM - 1, STALE_ENGINE, STALE_FROM, 0)
    assert old.abs_diff == pytest.approx(STALE_DIFF, rel=1e-4)
    assert new.abs_diff == pytest.approx(USUAL_DIFF, rel=1e-3)


def test_the_alarm_names_the_engine_and_its_stale_version(run: RunReader) -> None:
    alarm = run.alarms()[0]
    stale = f"weight version {STALE_FROM - 1} still served by engine {STALE_ENGINE}"
    assert alarm.title == f"Engine and trainer disagree since step {STALE_FROM}: {stale}"
    assert f"the 51% of tokens that version {STALE_FROM - 1} sampled differ by 0.5 nats and the others by 0.01" in alarm.text


def test_samples_without_engines_name_none(recorded: Path, tmp_path: Path) -> None:
    table = pq.read_table(recorded / "samples" / f"rollout_{STALE_FROM:06d}.parquet")
    pq.write_table(table.drop_columns(["spans", "engine"]), tmp_path / "older.parquet")
    assert {part.engine for part in mismatches(tmp_path / "older.parquet")} == {UNKNOWN}


def tokens(version: int, engine: int, abs_diff: float, num_tokens: int = 10) -> Mismatch:
    return Mismatch(version, engine, num_tokens, abs_diff)


@pytest.mark.parametrize(
    ("parts", "brief", "words"),
    [
        ([tokens(40, 2, 0.5), tokens(41, 0, 0.01, 30)], "weight version 40 still served by engine 2", "the 25% of tokens that version 40"),
        (
            [tokens(40, 2, 0.5), tokens(40, 5, 0.4), tokens(41, 0, 0.01)],
            "weight version 40 still served by engines 2 and 5",
            "others had 41",
        ),
        ([tokens(40, UNKNOWN, 0.5), tokens(41, UNKNOWN, 0.01)], "weight version 40 still served by an engine", "others had 41"),
        ([tokens(40, 0, 0.5), tokens(41, 0, 0.01)], "tokens of weight version 40", "started before it and continued"),
        ([tokens(39, 0, 0.2), tokens(39, 1, 0.2)], "weight version 39 still served by engines 0 and 1", "the engines were not updated"),
        ([tokens(41, 2, 0.5), tokens(41, 0, 0.01), tokens(41, 1, 0.01)], "engine 2 only", "its weights or settings differ"),
        ([tokens(40, 0, 0.01), tokens(41, 0, 0.25)], "weight version 41 only", "the newest weights are wrong"),
        (
            [tokens(41, 0, 0.2), tokens(41, 1, 0.25)],
            "all tokens equally",
            "of version 41 and of all engines disagree equally, so the cause is",
        ),
        ([tokens(40, 0, 0.2), tokens(41, 0, 0.25)], "all tokens equally", "of all versions (40, 41)"),
    ],
)
def test_the_cause_of_a_disagreement(parts: list[Mismatch], brief: str, words: str) -> None:
    found = explanation(41, parts, 41)
    assert found is not None
    assert found.brief == brief
    assert words in found.text


def test_rollouts_that_always_run_ahead_are_not_a_cause(tmp_path: Path) -> None:
    for staleness, known in ((1.0, STALE_FROM - 1), (0.0, STALE_FROM)):
        path = write_run(tmp_path / str(staleness))
        lines = [orjson.loads(line) | {"rollout/staleness": staleness} for line in (path / "metrics.jsonl").read_bytes().splitlines()]
        (path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        reader = RunReader(path, "run")
        reader.update_metrics()
        assert reader._expected_version(STALE_FROM) == known


def test_no_cause_without_tokens() -> None:
    assert explanation(7, [], None) is None
