"""Small arithmetic of sizes."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [size for size in range(1, number + 1) if number % size == 0]


def nearest_first(value: int, candidates: Iterable[int]) -> list[int]:
    """Candidates other than `value`, the one with the smallest factor to it first; of two alike the larger."""
    others = {candidate for candidate in candidates if candidate != value and candidate > 0}
    return sorted(others, key=lambda other: (max(other, value) / min(other, value), -other))
