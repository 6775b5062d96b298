"""Attribution: every instant of a step has one cause, and causes add up to the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.observability.viewer.attribution import SampleSpans, attribute, concurrency, covered
from fuligo.observability.viewer.trace_reader import PhaseEvent

intervals = st.tuples(st.floats(-5, 15), st.floats(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
phases = st.tuples(st.sampled_from(["rollout", "train", "score", "sync", "save", "mine"]), intervals).map(
    lambda pair: phase(pair[0], *pair[1])
)


def phase(name: str, start_s: float, end_s: float) -> PhaseEvent:
    return PhaseEvent(name, 0, 1, 0, start_s, end_s)


def seconds(window, phases, spans=None) -> dict[str, float]:
    return {cause.name: pytest.approx(cause.seconds) for cause in attribute(window, phases, spans)}


@given(st.lists(phases, max_size=8), st.lists(intervals, max_size=6), st.lists(intervals, max_size=6))
def test_causes_sum_to_the_window(phases, generate, reward) -> None:
    causes = attribute((0.0, 10.0), phases, SampleSpans(generate, reward))
    assert sum(cause.seconds for cause in causes) == pytest.approx(10.0)
    assert all(cause.seconds > 0 for cause in causes)


@given(st.lists(phases, max_size=6))
def test_a_cause_agrees_with_a_fine_grid(phases) -> None:
    """Oracle: the first phase by priority at every hundredth of a second."""
    order = ["sync", "train", "score", "save", "mine", "rollout"]
    grid = [(at + 0.5) / 100 for at in range(1000)]
    expected: dict[str, float] = {}
    for time in grid:
        running = [name for name in order if any(one.name == name and one.start_s <= time < one.end_s for one in phases)]
        cause = running[0] if running else "between phases"
        expected[cause] = expected.get(cause, 0) + 0.01
    found = {cause.name: cause.seconds for cause in attribute((0.0, 10.0), phases)}
    for name in expected.keys() | found.keys():
        assert found.get(name, 0) == pytest.approx(expected.get(name, 0), abs=0.01 * (2 * len(phases) + 1))


def test_a_rollout_beside_training_costs_nothing() -> None:
    assert seconds((0, 10), [phase("rollout", 0, 10), phase("train", 2, 9)]) == {"train": 7, "rollout": 3}


def test_a_rollout_is_divided_by_what_its_samples_do() -> None:
    """Eight samples run until 4 s, one of them until 7 s, and its reward until 8 s."""
    spans = SampleSpans([*[(1.0, 4.0)] * 7, (1.0, 7.0)], [(7.0, 8.0)])
    assert seconds((0, 10), [phase("rollout", 0, 10)], spans) == {"sampling": 3, "last samples": 3, "reward": 1, "rollout": 3}


def test_an_empty_window_has_no_causes() -> None:
    assert attribute((5.0, 5.0), [phase("train", 0, 10)]) == []


def test_covered_counts_overlaps_once() -> None:
    assert covered((0, 10), [(1, 3), (2, 4), (9, 20)]) == pytest.approx(4)


def test_concurrency() -> None:
    assert concurrency((0, 4), [(0, 2), (1, 4)], 4) == [1, 2, 1, 1]
