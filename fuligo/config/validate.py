"""Check that the flags of a config fit together. Reads no file (see `fuligo.cli.preflight` for those)."""

from collections.abc import Iterable
from dataclasses import replace

from fuligo.config import Config
from fuligo.config.changes import change_text
from fuligo.config.findings import Change, Finding, Rule, Severity
from fuligo.config.rules import (
    advice,
    cluster,
    combinations,
    distillation,
    effects,
    exactness,
    lora,
    prefixes,
    required,
    routing_replay,
    sizes,
    vision,
)
from fuligo.errors import ConfigError

_MODULES = (required, combinations, cluster, sizes, routing_replay, distillation, lora, vision, prefixes, exactness, effects, advice)
RULES: tuple[Rule[Config, Change], ...] = tuple(
    rule for module in _MODULES for rule in getattr(module, "RULES", vars(module).values()) if isinstance(rule, Rule)
)
"""All rules that need no facts about the model or the GPUs. The docstring of a rule's `check` gives its reason."""


def validate(config: Config) -> list[str]:
    """Check all rules.

    Returns:
        The warnings, one line each.

    Raises:
        ConfigError: the errors, one line each.
    """
    return require_no_errors(findings(config), config)


def require_no_errors(found: Iterable[Finding], config: Config) -> list[str]:
    """Raise the errors among the findings.

    Returns:
        The warnings, one line each.

    Raises:
        ConfigError: the errors, one line each.
    """
    lines: dict[Severity, list[str]] = {severity: [] for severity in Severity}
    for finding in found:
        lines[finding.severity].append(described(finding, config))
    if lines[Severity.ERROR]:
        raise ConfigError(*lines[Severity.ERROR])
    return lines[Severity.WARNING]


def findings(config: Config) -> tuple[Finding, ...]:
    """Return the findings of all rules, errors first."""
    found = [replace(rule.finding(violation), fix=violation.fix) for rule in RULES for violation in rule.violations(config)]
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.ERROR))


def described(finding: Finding, config: Config) -> str:
    """Return a finding as one line: the problem, then the remedies."""
    changes = [change_text(change, config) for change in finding.fix]
    remedies = [" and ".join(f"use {text}" if text.startswith("--") else text for text in changes), finding.advice]
    return "; ".join(filter(None, [finding.text, *remedies]))
