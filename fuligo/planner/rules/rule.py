"""Rules of the planner: pure functions of the subject that yield violations with fixes to try; arithmetic for fixes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fuligo.config.findings import Change, Severity
from fuligo.planner.subject import Subject

Fix = tuple[Change, ...]
"""Changes that are applied together."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of a rule by a subject."""

    text: str
    """Flags with their values, and the rule with the numbers of this run."""
    fixes: tuple[Fix, ...] = ()
    """Fixes to try, the smallest change first; the first that passes all rules is shown."""
    advice: str = ""
    """Remedy in words, if no change of flags fixes it."""
    flags: tuple[str, ...] = ()
    """Options that the text is about, if they differ from those of the rule."""


@dataclass(frozen=True, slots=True)
class PlannerRule:
    """Check with an id."""

    id: str
    """Stable name, `PLAN-...`."""
    severity: Severity
    flags: tuple[str, ...]
    """Options that the rule is about, as typed."""
    check: Callable[[Subject], Iterator[Violation]]

    @property
    def why(self) -> str:
        """First line of the check's docstring."""
        return (self.check.__doc__ or "").strip().splitlines()[0]


def rule(
    rule_id: str, *options: str, severity: Severity = Severity.ERROR
) -> Callable[[Callable[[Subject], Iterator[Violation]]], PlannerRule]:
    """Turn a function into a rule; the first line of its docstring states the reason."""
    return lambda check: PlannerRule(rule_id, severity, options, check)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def nearest_first(value: int, candidates: Iterable[int]) -> list[int]:
    """Return the candidates other than `value`, sorted by their ratio to it; ties go to the larger."""
    others = {candidate for candidate in candidates if candidate != value and candidate > 0}
    return sorted(others, key=lambda other: (max(other, value) / min(other, value), -other))
