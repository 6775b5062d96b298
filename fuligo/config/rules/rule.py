"""Decorator and helpers for rules: pure functions of the config that return a violation, or None."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fuligo.config import Config
from fuligo.config.findings import Change, Finding, Rule, Severity
from fuligo.config.flags import flags


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of a rule by a config."""

    text: str
    """Flags with their values, and the rule; the remedy is in `fix` or `advice`."""
    fix: tuple[Change, ...] = ()
    advice: str = ""
    flags: tuple[str, ...] = ()
    """Options that the text is about, if they differ from those of the rule."""


def rule(
    rule_id: str, *options: str, severity: Severity = Severity.ERROR
) -> Callable[[Callable[[Config], Violation | None]], Rule[Config]]:
    """Turn a function into a `Rule`.

    Args:
        rule_id: stable name, `CFG-...`.
        options: flags that the rule is about, as typed.
    """

    def make(function: Callable[[Config], Violation | None]) -> Rule[Config]:
        @functools.wraps(function)
        def check(config: Config) -> Iterator[Finding]:
            violation = function(config)
            if violation is not None:
                yield Finding(rule_id, severity, violation.text, violation.flags or options, violation.fix, violation.advice)

        return Rule(rule_id, check)

    return make


def set_flag(name: str, value: Any) -> Change:
    """Return the change that sets a typed flag."""
    return Change((flags()[name].group, name), value)


def unset_flag(name: str) -> Change:
    """Return the change that restores the default of a typed flag."""
    return set_flag(name, None)
