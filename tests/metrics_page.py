"""Table of docs/metrics.md: every key of `metrics.jsonl`, where `<...>` stands for any text."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    key: str
    has_clock: bool
    unit: str


ROWS = re.findall(
    r"^\| `(.+?)`( ⏱)? \| (.*?) \| .+ \| .*\|$", (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8"), re.MULTILINE
)
METRICS = [Metric(key, bool(clock), unit) for key, clock, unit in ROWS]
_PATTERNS = ["".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", metric.key)) for metric in METRICS]


def undocumented(keys: Iterable[str]) -> list[str]:
    """Return the keys that the table lacks."""
    return [key for key in keys if not any(re.fullmatch(pattern, key) for pattern in _PATTERNS)]
