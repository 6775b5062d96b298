"""Which rules a changed config breaks, without looking for fixes: a suggestion must break none that was kept before."""

from __future__ import annotations

from fuligo.config.findings import Severity
from fuligo.planner.check import broken_rules
from fuligo.planner.subject import Subject


def rule_errors(subject: Subject) -> frozenset[str]:
    """Ids of the broken rules."""
    return frozenset(finding.id for finding in broken_rules(subject) if finding.severity is Severity.ERROR)
