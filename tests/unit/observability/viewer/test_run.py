"""Reader of a run: state, current phase, missing files."""

from pathlib import Path

import pytest

from fuligo.observability.viewer.answers import run_answer, sample_answer, step_answer, steps_answer
from fuligo.observability.viewer.now import is_locked, run_state
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.settings import differences, read_settings
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, PHASES, STEP_S, begin_run, write_run


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({"num_done": 10, "num_rollouts": 10, "locked": False, "age_s": 5.0, "step_s": 1.0}, "finished"),
        ({"num_done": 4, "num_rollouts": 10, "locked": True, "age_s": 5.0, "step_s": 1.0}, "running"),
        ({"num_done": 4, "num_rollouts": 10, "locked": True, "age_s": 500.0, "step_s": 1.0}, "quiet"),
        ({"num_done": 4, "num_rollouts": 10, "locked": True, "age_s": 500.0, "step_s": 300.0}, "running"),
        ({"num_done": 0, "num_rollouts": 10, "locked": True, "age_s": 500.0, "step_s": None}, "running"),
        ({"num_done": 0, "num_rollouts": 10, "locked": True, "age_s": 5000.0, "step_s": None}, "quiet"),
        ({"num_done": 4, "num_rollouts": 10, "locked": False, "age_s": 500.0, "step_s": 1.0}, "stopped"),
        ({"num_done": 0, "num_rollouts": None, "locked": False, "age_s": None, "step_s": None}, "empty"),
    ],
)
def test_state(known: dict, state: str) -> None:
    assert run_state(**known) == state


def test_the_lock_of_a_run_is_seen_and_not_touched(tmp_path: Path) -> None:
    live = begin_run(tmp_path / "run")
    if not is_locked(tmp_path / "run" / "metrics.jsonl"):
        pytest.skip("this system does not show locks in /proc/locks")
    live.directory.close()
    assert is_locked(tmp_path / "run" / "metrics.jsonl") is False


def test_now_is_the_phase_that_has_begun(tmp_path: Path) -> None:
    live = begin_run(tmp_path / "run")
    run = RunReader(tmp_path / "run", "run")

    def now() -> tuple[str | None, int | None]:
        run.update_rest(0.0)
        found = run.now()
        return found.doing, found.doing_step

    assert now() == (None, None)
    with live.directory.trace.phase("start", 0):
        assert now() == ("loading", 0)
    with live.directory.trace.phase("rollout", 1):
        assert now() == ("sampling", 1)
        with live.directory.trace.phase("train", 0):
            assert now() == ("training", 0), "a rollout beside it runs ahead"
        assert now() == ("sampling", 1)
    live.directory.close()


def test_steps_sum_to_their_seconds(run: RunReader) -> None:
    answer = steps_answer(run)
    assert answer["steps"] == list(range(NUM_STEPS))
    for at in range(NUM_STEPS):
        assert sum(seconds[at] for seconds in answer["causes"].values()) == pytest.approx(STEP_S, abs=0.02)
    assert answer["causes"]["train"][3] == pytest.approx(2.5, abs=0.02)


def test_the_timeline_of_a_step(run: RunReader) -> None:
    answer = step_answer(run, 4)
    assert answer is not None
    driver = [phase for phase in answer["phases"] if phase["track"] == "driver 0"]
    assert [(phase["name"], phase["start_s"], phase["end_s"]) for phase in driver] == [
        (name, pytest.approx(start, abs=1e-4), pytest.approx(end, abs=1e-4)) for name, start, end in PHASES
    ]
    assert sum(cause["seconds"] for cause in answer["causes"]) == pytest.approx(STEP_S, abs=1e-4)
    assert max(answer["generating"]) == 16
    assert [sample["row"] for sample in answer["longest"]] == list(range(15, 3, -1))
    assert answer["longest"][0]["alone_s"] == pytest.approx(4.5 / 16, abs=1e-4)


def test_ranks_and_engines_have_tracks_of_their_own(run: RunReader) -> None:
    answer = step_answer(run, 4)
    assert answer is not None
    by_rank = {
        rank: [(phase["name"], phase["step"]) for phase in answer["phases"] if phase["track"] == f"rank {rank} 0"] for rank in range(2)
    }
    computed = [("score", 4), ("forward, backward", 4), ("optimizer", 4)]
    assert by_rank == {0: [*computed, ("send", 4)], 1: computed}
    assert [engine["number"] for engine in answer["engines"]] == [0, 1]
    assert [max(engine["in_flight"]) for engine in answer["engines"]] == [8, 8]
    # Rows 0 to 7 are engine 0's, the last of them done after half of 4.5 s; engine 1 is done at the end.
    assert [engine["idle"] for engine in answer["engines"]] == [pytest.approx(1 - 0.225), pytest.approx(1 - 0.45)]
    assert {cause["name"] for cause in answer["causes"]}.isdisjoint({"forward, backward", "optimizer", "send"}), "the driver's time alone"


def test_a_step_without_trace_has_the_seconds_of_its_metrics(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", num_steps=2)
    (path / "trace.json").unlink()
    run = RunReader(path, "run")
    answer = step_answer(run, 1)
    assert answer is not None
    assert {cause["name"]: cause["seconds"] for cause in answer["causes"]} == {"rollout": 6.0, "train": 2.5, "between phases": 1.5}


def test_a_sample_whole(run: RunReader) -> None:
    answer = sample_answer(run, 4, 5)
    assert answer is not None
    assert [(part["name"], part["text"]) for part in answer["segments"]] == [
        ("template", "<|im_start|>user\n"),
        ("user", "What is 12 + 9?"),
        ("template", "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert set(answer["tokens"]["sources"]) == {"sampled"}
    assert "".join(answer["tokens"]["texts"]) == answer["response"]
    assert len(answer["tokens"]["engine_logprobs"]) == answer["length"]
    assert [member["row"] for member in answer["members"]] == [4, 5, 6, 7]


def test_a_sample_is_there_before_the_index_knows_it(recorded: Path) -> None:
    answer = sample_answer(RunReader(recorded, "recorded"), 4, 5)
    assert answer is not None
    assert answer["index"] == 4 * 16 + 5


def test_problems_name_missing_files(tmp_path: Path) -> None:
    run = RunReader(tmp_path, "run")
    problems = "\n".join(run_answer(run)["problems"])
    for name in ("metrics.jsonl", "config.yaml", "trace.json", "samples/"):
        assert f"{name} is missing" in problems


def test_settings_that_differ(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-4), ("b", 1e-4), ("c", 5e-5)):
        write_run(tmp_path / name, num_steps=1, lr=lr, name="same")
    settings = [read_settings(tmp_path / name / "config.yaml") for name in "abc"]
    rows = differences(settings)
    assert [(row.group, row.name) for row in rows] == [("optimizer", "lr")]
    assert [float(value) for value in rows[0].values] == [1e-4, 1e-4, 5e-5]
    assert differences(settings[:2]) == []
    assert {row.name: row.values for row in differences([{"g.x": 1}, {}])} == {"x": ("1", "–")}


def test_settings_of_a_broken_file_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: [1, 2")
    assert read_settings(tmp_path / "config.yaml") == {}
