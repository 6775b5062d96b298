"""Formatting of quantities for people."""

from collections.abc import Iterable

_GIB = 1024**3


def gibibytes(num_bytes: int) -> str:
    """Format bytes in GiB: `61.2 GiB`."""
    return f"{num_bytes / _GIB:.1f} GiB"


def amount(num_bytes: float) -> str:
    """Format bytes in TiB, GiB or MiB: `9.5 TiB`, `61.2 GiB`, `256 MiB`, `0.4 MiB`."""
    if num_bytes >= 1024 * _GIB:
        return f"{num_bytes / (1024 * _GIB):.1f} TiB"
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    mebibytes = num_bytes / 1024**2
    return f"{mebibytes:.{1 if mebibytes < 100 else 0}f} MiB"


def seconds(duration_s: float) -> str:
    """Format a duration: `0.35 s`, `3.5 s`, `212 s`, `12.4 min`, `3.1 h`."""
    if duration_s >= 2 * 3600:
        return f"{duration_s / 3600:.1f} h"
    if duration_s >= 600:
        return f"{duration_s / 60:.1f} min"
    digits = 2 if duration_s < 1 else 1 if duration_s < 10 else 0
    return f"{duration_s:.{digits}f} s"


def magnitude(number: int) -> str:
    """Format a number with three digits and a unit: `752 k`, `9.40 M`, `744 B`, `1.05 T`; integers below 1,000 as they are."""
    if number < 1000:
        return str(number)
    for power, letter in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if number >= 10**power:
            value = number / 10**power
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {letter}"
    raise AssertionError("unreachable: a number of at least 1,000 has a unit")


def count(number: int, noun: str) -> str:
    """Format a count with its noun: `1 node`, `32 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `0-7, 9`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def as_typed(changes: Iterable[str]) -> str:
    """Join suggested changes: flags to add first, ready to paste, then the others: `--colocate --rollout-num-gpus 8; drop --lr`."""
    texts = list(changes)
    added = " ".join(text for text in texts if text.startswith("--"))
    parts = [added, *(text for text in texts if not text.startswith("--"))]
    return "; ".join(part for part in parts if part)
