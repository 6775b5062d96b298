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


TIMING_KEYS = frozenset({"time", "rollout/tokens_per_s", "train/tokens_per_s", "rollout/sample/environment_s"})
TIMING_PREFIXES = ("perf/", "engine/")


def is_timing(key: str) -> bool:
    """Return whether the value depends on the clock and so differs between two runs that are otherwise equal bit for bit."""
    return key in TIMING_KEYS or key.startswith(TIMING_PREFIXES)
