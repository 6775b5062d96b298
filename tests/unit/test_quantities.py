"""Quantities as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.quantities import amount, as_typed, count, gibibytes, magnitude, ranges, seconds


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.0, "0.00 s"), (0.347, "0.35 s"), (3.5, "3.5 s"), (212.4, "212 s"), (900, "15.0 min"), (7200, "2.0 h")],
)
def test_seconds(duration_s: float, text: str):
    assert seconds(duration_s) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (9_400_279_040, "9.40 B"), (40_100_000_000, "40.1 B"), (743_900_000_000, "744 B")],
)
def test_magnitude(number: int, text: str):
    assert magnitude(number) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 MiB"),
        (400_000, "0.4 MiB"),
        (256 * 1024**2, "256 MiB"),
        (1024**3, "1.0 GiB"),
        (2**40 - 2**30, "1023.0 GiB"),
        (2**40, "1.0 TiB"),
    ],
)
def test_amounts_of_the_large_and_the_small(num_bytes: int, text: str):
    assert amount(num_bytes) == text


def test_gibibytes_and_counts():
    assert gibibytes(80 * 1024**3) == "80.0 GiB"
    assert [count(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


def test_ranges():
    assert ranges([5, 0, 1, 2, 2, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_name_every_number_once(numbers: set[int]):
    named: list[int] = []
    for part in ranges(numbers).split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


def test_changes_as_typed():
    assert as_typed(["--lr 1e-6", "--min-lr 0"]) == "--lr 1e-6 --min-lr 0"
    assert as_typed(["--colocate", "drop --lr", "--min-lr 0"]) == "--colocate --min-lr 0; drop --lr"
    assert as_typed(["drop --lr", "drop --min-lr"]) == "drop --lr; drop --min-lr"
