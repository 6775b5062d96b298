"""Arithmetic of sizes."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """Return all divisors, rising."""
    return [size for size in range(1, number + 1) if number % size == 0]


def nearest_first(value: int, candidates: Iterable[int]) -> list[int]:
    """Return the candidates other than `value`, sorted by their ratio to it; ties go to the larger."""
    others = {candidate for candidate in candidates if candidate != value and candidate > 0}
    return sorted(others, key=lambda other: (max(other, value) / min(other, value), -other))
