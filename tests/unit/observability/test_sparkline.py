"""Sparklines."""

from hypothesis import given
from hypothesis import strategies as st

from fuligo.observability.progress import sparkline

BARS = "▁▂▃▄▅▆▇█"


def test_each_level_has_a_bar() -> None:
    assert sparkline(range(8), 8) == BARS
    assert sparkline([], 8) == ""
    assert sparkline([3, 3], 8) == "▁▁"


def test_the_scale_can_be_given() -> None:
    assert sparkline([0.0, 0.5, 1.0], 8, low=0, high=2) == "▁▃▅"
    assert sparkline([-1.0, 3.0], 8, low=0, high=2) == "▁█", "values beyond the scale are clamped"


def test_long_curves_are_averaged() -> None:
    assert sparkline([0, 2, 4, 6, 8, 10], 3) == "▁▅█"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 100))
def test_sparkline_has_the_width_and_follows_its_values(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    if len(values) <= width:
        pairs = list(zip(values, line, strict=True))
        assert all(BARS.index(bar) <= BARS.index(other) for value, bar in pairs for higher, other in pairs if value < higher)
