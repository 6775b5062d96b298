"""Traces: phases nest or run on separate tracks, and the file is readable at any time."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path

import pytest

from fuligo.errors import CheckpointWriteError, FuligoError
from fuligo.observability import trace as trace_module
from fuligo.observability.trace import DRIVER_PID, ENGINE_PID, MAX_LANES, MAX_RANKS, RANK_PID, SAMPLE_PIDS, Trace, read_trace
from fuligo.types import Sample, SampleGroup, Span
from tests.small_disk import SmallDisk


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path / "trace.json")


def phases(trace: Trace) -> list[dict]:
    return [event for event in read_trace(trace.path) if event["ph"] == "X" and event["pid"] == DRIVER_PID]


def assert_tracks_are_drawable(events: list[dict]) -> None:
    """Assert that events of one track are disjoint or nested."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        for number, (start, end) in enumerate(spans):
            for other_start, other_end in spans[number + 1 :]:
                apart = end <= other_start or other_end <= start
                nested = (start <= other_start and other_end <= end) or (other_start <= start and end <= other_end)
                assert apart or nested, (start, end, other_start, other_end)


def test_the_unfinished_file_is_a_json_array_but_for_its_bracket(trace: Trace) -> None:
    with trace.phase("rollout", 0):
        text = trace.path.read_text()
        json.loads(text.rstrip(",\n") + "]")
    json.loads(trace.path.read_text().rstrip(",\n") + "]")


def test_a_nested_phase_lies_inside_its_parent_on_the_same_track(trace: Trace) -> None:
    with trace.phase("train", 3), trace.phase("forward", 3):
        pass
    inner, outer = phases(trace)
    assert (inner["name"], outer["name"], inner["tid"], outer["tid"]) == ("forward", "train", 0, 0)
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1  # rounded to microseconds
    assert outer["args"] == {"step": 3}


async def test_phases_of_concurrent_tasks_get_tracks_of_their_own(trace: Trace) -> None:
    begun = asyncio.Barrier(3)

    async def work(name: str, step: int) -> None:
        with trace.phase(name, step):
            await begun.wait()

    with trace.phase("step", 0):
        await asyncio.gather(work("rollout", 1), work("train", 0), work("eval", 0))
    with trace.phase("rollout", 2):
        pass
    tracks = {event["name"]: event["tid"] for event in phases(trace) if event["args"]["step"] < 2}
    assert len({tracks["rollout"], tracks["train"], tracks["eval"]}) == 3
    assert phases(trace)[-1]["tid"] == 0, "a free track is reused"
    assert_tracks_are_drawable(phases(trace))


async def test_a_phase_in_a_thread_is_a_child_of_the_one_that_awaits_it(trace: Trace) -> None:
    def compute() -> None:
        with trace.phase("optimizer", 0):
            pass

    with trace.phase("train", 0):
        await asyncio.to_thread(compute)
    assert [(event["name"], event["tid"]) for event in phases(trace)] == [("optimizer", 0), ("train", 0)]


def test_a_phase_that_fails_is_marked(trace: Trace) -> None:
    with pytest.raises(RuntimeError), trace.phase("train", 0):
        raise RuntimeError
    assert phases(trace)[0]["args"] == {"step": 0, "failed": True}


def test_a_full_disk_does_not_hide_the_error_of_the_phase(small_disk: SmallDisk) -> None:
    trace = Trace(small_disk.path / "trace.json")
    with pytest.raises(CheckpointWriteError, match="no room"), trace.phase("save", 1):
        small_disk.fill()
        trace.path.with_name("rest").write_bytes(b"")  # an entry needs no block
        (small_disk.path / "trace.json").open("ab").close()
        raise CheckpointWriteError("no room")
    with pytest.raises(FuligoError, match=r"cannot write .*trace\.json: No space left on device \(0 of 4 MiB"):
        for step in range(100):  # the rest of its last block
            with trace.phase("train", step):
                pass
    with pytest.raises(FuligoError, match=r"cannot write .*trace\.json: No space left on device"):
        trace.cut_back(90)


def test_durations_add_up_by_step_and_name_and_are_taken_once(trace: Trace) -> None:
    for step in (0, 0, 1):
        with trace.phase("train", step):
            pass
    with trace.phase("sync", 0):
        pass
    durations = trace.take_durations(0)
    assert set(durations) == {"train", "sync"} and all(seconds > 0 for seconds in durations.values())
    assert trace.take_durations(0) == {}
    assert set(trace.take_durations(1)) == {"train"}


def test_the_listener_is_called_for_every_phase(trace: Trace) -> None:
    heard = []
    trace.on_phase = lambda name, step: heard.append((name, step))
    with trace.phase("rollout", 7):
        assert heard == [("rollout", 7)]


def test_spans_of_samples_are_packed_to_tracks_without_overlap(trace: Trace, make_group) -> None:
    samples = make_group(0, size=20).samples
    for position, sample in enumerate(samples):
        sample.spans = [Span("generate", position * 0.3, position * 0.3 + 1.0), Span("reward", 5.0, 6.0 + position), Span("search", 1, 2)]
    trace.samples(4, samples)
    events = [event for event in read_trace(trace.path) if event["ph"] == "X"]
    assert len(events) == 60
    assert_tracks_are_drawable(events)
    generate = [event for event in events if event["pid"] == SAMPLE_PIDS["generate"]]
    assert len({event["tid"] for event in generate}) == 4, "at most four overlap"
    assert {event["name"] for event in events} == {"generate", "reward", "search"}
    assert generate[0]["args"] == {"step": 4, "index": 0, "tokens": 3, "status": "completed"}


def test_a_wide_rollout_fills_the_tracks_with_its_longest_spans(trace: Trace, make_group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_SPANS_PER_STEP", 2 * MAX_LANES)
    samples: list[Sample] = make_group(0, size=3 * MAX_LANES).samples
    for sample in samples:
        sample.spans = [Span("generate", 0.0, 1.0 + sample.index)]
    trace.samples(0, samples)
    shown = [event for event in read_trace(trace.path) if event["ph"] == "X"]
    assert len(shown) == MAX_LANES
    assert min(event["args"]["index"] for event in shown) >= MAX_LANES, "the shortest are left out"


def names_of_processes(trace: Trace) -> list[tuple[int, str]]:
    return [(event["pid"], event["args"]["name"]) for event in read_trace(trace.path) if event["ph"] == "M" and event["pid"] >= RANK_PID]


def test_each_engine_has_its_own_tracks(trace: Trace, make_group) -> None:
    for step in range(2):
        trace.samples(step, make_group(step, size=4).samples)  # by engines 0 and 1 in turn
    events = [event for event in read_trace(trace.path) if event["ph"] == "X" and event["pid"] >= ENGINE_PID]
    assert [(event["pid"] - ENGINE_PID, event["args"]["index"]) for event in events] == [(index % 2, index) for index in range(8)]
    assert_tracks_are_drawable(events)
    assert names_of_processes(trace) == [(ENGINE_PID, "engine 0"), (ENGINE_PID + 1, "engine 1")], "named once"


def test_ranks_have_tracks_and_sent_weights_belong_to_the_previous_step(trace: Trace) -> None:
    trace.ranks(3, [[Span("send", 1.0, 2.0), Span("optimizer", 3.0, 4.0)], [Span("optimizer", 3.0, 4.5)]])
    events = [event for event in read_trace(trace.path) if event["ph"] == "X"]
    assert [(event["pid"] - RANK_PID, event["name"], event["args"]["step"], event["dur"]) for event in events] == [
        (0, "send", 2, 1_000_000),
        (0, "optimizer", 3, 1_000_000),
        (1, "optimizer", 3, 1_500_000),
    ]
    assert names_of_processes(trace) == [(RANK_PID, "rank 0"), (RANK_PID + 1, "rank 1")]


def test_the_slowest_of_many_ranks_are_written(trace: Trace) -> None:
    trace.ranks(0, [[Span("optimizer", 0.0, rank % 100)] for rank in range(256)])
    ranks = [event["pid"] - RANK_PID for event in read_trace(trace.path) if event["ph"] == "X"]
    assert len(ranks) == MAX_RANKS and ranks[0] == 0
    assert min(rank % 100 for rank in ranks[1:]) >= 80


def test_no_ranks_write_no_events(trace: Trace) -> None:
    before = trace.path.read_bytes()
    trace.ranks(0, [])
    assert trace.path.read_bytes() == before


def test_beyond_its_size_only_phases_are_written(tmp_path: Path, make_group) -> None:
    trace = Trace(tmp_path / "trace.json", max_bytes=1)
    group: SampleGroup = make_group()
    trace.samples(0, group.samples)
    trace.ranks(0, [group.samples[0].spans])
    with trace.phase("train", 0):
        pass
    assert [event["name"] for event in read_trace(trace.path) if event["ph"] == "X"] == ["train"]


def test_cut_back_keeps_the_earlier_steps(trace: Trace, make_group) -> None:
    for step in range(4):
        with trace.phase("rollout", step):
            pass
        trace.samples(step, make_group(step).samples)
    trace.cut_back(2)
    assert trace.take_durations(2) == {}, "the step is repeated"
    with trace.phase("rollout", 2):
        pass
    events = read_trace(trace.path)
    assert sorted(event["args"]["step"] for event in events if event["name"] == "rollout") == [0, 1, 2]
    assert {event["args"]["step"] for event in events if event["name"] == "generate"} == {0, 1}
    assert any(event["ph"] == "M" for event in events)


def test_a_torn_event_is_removed_when_the_run_continues(trace: Trace) -> None:
    with trace.phase("rollout", 0):
        pass
    trace.close()
    with trace.path.open("ab") as file:
        file.write(b'{"name": "train", "ph": "X", "ts": 17')
    continued = Trace(trace.path)
    with continued.phase("rollout", 1):
        pass
    json.loads(trace.path.read_text().rstrip(",\n") + "]")
    assert [event["args"]["step"] for event in phases(continued)] == [0, 1]
