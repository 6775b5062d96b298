"""Findings of rules, and the changes of a config that resolve them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any, Generic, TypeVar

S = TypeVar("S")
F = TypeVar("F")


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    """The run would fail or give wrong results; it does not start."""
    WARNING = "warning"
    """The setting is allowed but probably not intended."""


@dataclass(frozen=True, slots=True)
class Change:
    """New value for one entry of a Config."""

    path: tuple[str | int, ...]
    """Path into the Config: `("parallel", "tensor_model_parallel_size")`, `("sglang", "dp_size")`,
    `("engine", "sglang_config", 0, "server_groups", 1, "num_gpus")`."""
    value: Any
    """New value; None unsets the entry."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Violated rule, with the numbers of this run."""

    id: str
    """Stable name of the rule, such as `PLAN-DSA-STAGE-START`."""
    severity: Severity
    text: str
    """Flags, values and rule in one or two sentences; names at least one flag."""
    flags: tuple[str, ...]
    """Options that the text is about, as typed: `--tensor-model-parallel-size`."""
    fix: tuple[Change, ...] = ()
    """Changes that resolve the finding together; the planner's `check` removes them if the finding remains or a new one appears."""
    advice: str = ""
    """Remedy in words, in place of `fix` or as an alternative to it; may be empty."""


@dataclass(frozen=True, slots=True)
class Violation(Generic[F]):
    """Violation of a rule by its subject."""

    text: str
    """Flags with their values, and the rule with the numbers of this run; the remedy is in `fix` or `advice`."""
    fix: tuple[F, ...] = ()
    """Changes that resolve it together. A planner rule lists alternative fixes, of which one that violates no other rule is shown."""
    advice: str = ""
    """Remedy in words, in place of `fix` or as an alternative to it."""
    flags: tuple[str, ...] = ()
    """Options that the text is about, if they differ from those of the rule."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[S, F]):
    """Check of a subject: a `Config`, or a `Subject` of the planner."""

    id: str
    """Stable name, `CFG-...` or `PLAN-...`."""
    severity: Severity
    flags: tuple[str, ...]
    """Options that the rule is about, as typed."""
    check: Callable[[S], Iterator[Violation[F]]]
    """Pure function; the first line of its docstring is the reason."""

    @property
    def why(self) -> str:
        """First line of the check's docstring."""
        return (self.check.__doc__ or "").strip().splitlines()[0]

    def finding(self, violation: Violation[F]) -> Finding:
        """Return the finding of a violation, without a fix."""
        return Finding(self.id, self.severity, violation.text, violation.flags or self.flags, advice=violation.advice)


def errors_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR))


def rule(rule_id: str, *options: str, severity: Severity = Severity.ERROR) -> Callable[[Callable[[S], Iterator[Violation[F]]]], Rule[S, F]]:
    """Return a decorator that turns a check into a rule; the first line of the check's docstring states the reason."""
    return lambda check: Rule(rule_id, severity, options, check)


def simple_rule(
    rule_id: str,
    options: str,
    why: str,
    applies: Callable[[S], object],
    text: str | Callable[[S], str],
    *fix: F,
    advice: str = "",
    severity: Severity = Severity.ERROR,
) -> Rule[S, F]:
    """Return a rule whose fix does not depend on the subject, for tables of rules.

    `options` are separated by spaces, and `applies` returns whether the subject violates the rule.
    """

    def check(subject: S) -> Iterator[Violation[F]]:
        if applies(subject):
            yield Violation(text if isinstance(text, str) else text(subject), fix, advice)

    check.__doc__ = why
    return Rule(rule_id, severity, tuple(options.split()), check)


def rules_of(modules: Iterable[ModuleType]) -> tuple[Rule[Any, Any], ...]:
    """Return the rules of modules and of their tables, in the order of their definitions."""
    values = (value for module in modules for value in vars(module).values())
    return tuple(rule for value in values for rule in (value if isinstance(value, tuple) else (value,)) if isinstance(rule, Rule))
