"""Parts of the planner's rules: functions of the subject that yield violations with fixes to try; arithmetic for fixes."""

from collections.abc import Iterable

from fuligo.config.findings import Change, Violation, rule

__all__ = ["Fix", "Violation", "divisors", "nearest_first", "rule"]

Fix = tuple[Change, ...]
"""Changes that are applied together."""


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def nearest_first(value: int, candidates: Iterable[int]) -> list[int]:
    """Return the positive candidates other than `value`, nearest ratio first; of two equally near candidates the larger comes first."""
    others = {candidate for candidate in candidates if candidate != value and candidate > 0}
    return sorted(others, key=lambda other: (max(other, value) / min(other, value), -other))
