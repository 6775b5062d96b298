"""How a rule of the planner is written: a pure function of the subject that says what is broken, and ways out to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fuligo.config.findings import Change, Severity
from fuligo.planner.subject import Subject

Fix = tuple[Change, ...]
"""Changes that mend together."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What a rule says of a subject."""

    text: str
    """The flags with their values, and the rule, with the numbers of this run."""
    fixes: tuple[Fix, ...] = ()
    """Ways out, the least change first; the first that passes all rules is shown."""
    advice: str = ""
    """What to do, in words, where no change of flags mends it."""
    flags: tuple[str, ...] = ()
    """Options that the text is about, where they are not those of the rule."""


@dataclass(frozen=True, slots=True)
class PlannerRule:
    """A named check."""

    id: str
    """Stable name, `PLAN-...`."""
    severity: Severity
    flags: tuple[str, ...]
    """Options that it is about, as typed."""
    check: Callable[[Subject], Iterator[Broken]]

    @property
    def why(self) -> str:
        """One line: the docstring of the check."""
        return (self.check.__doc__ or "").strip().splitlines()[0]


def rule(
    rule_id: str, *options: str, severity: Severity = Severity.ERROR
) -> Callable[[Callable[[Subject], Iterator[Broken]]], PlannerRule]:
    """Makes a rule of a function, whose docstring says in one line why it is one.

    Args:
        rule_id: stable name, `PLAN-...`.
        options: the flags that it is about, as typed.
    """
    return lambda check: PlannerRule(rule_id, severity, options, check)
