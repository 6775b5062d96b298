"""How a rule of flags is written: a pure function of the config that returns what is wrong, or None."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fuligo.config import Config
from fuligo.config.findings import Change, Finding, Rule, Severity
from fuligo.config.flags import flags


@dataclass(frozen=True, slots=True)
class Violation:
    """What a rule says of a config."""

    text: str
    """The flags with their values, and the rule; the way out stands in `fix` or `advice`."""
    fix: tuple[Change, ...] = ()
    advice: str = ""
    flags: tuple[str, ...] = ()
    """Options that the text is about, where they are not those of the rule."""


def rule(
    rule_id: str, *options: str, severity: Severity = Severity.ERROR
) -> Callable[[Callable[[Config], Violation | None]], Rule[Config]]:
    """Makes a `Rule` of a function.

    Args:
        rule_id: stable name, `CFG-...`.
        options: the flags that it is about, as typed.
    """

    def make(function: Callable[[Config], Violation | None]) -> Rule[Config]:
        @functools.wraps(function)
        def check(config: Config) -> Iterator[Finding]:
            broken = function(config)
            if broken is not None:
                yield Finding(rule_id, severity, broken.text, broken.flags or options, broken.fix, broken.advice)

        return Rule(rule_id, check)

    return make


def set_flag(name: str, value: Any) -> Change:
    """The change of a flag of ours."""
    return Change((flags()[name].group, name), value)


def unset_flag(name: str) -> Change:
    """A flag of ours is left out: it has its default again."""
    return set_flag(name, None)
