"""All rules at once: what a config breaks, and for each finding a fix that was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fuligo.config.changes import apply_changes
from fuligo.config.findings import Finding, Severity
from fuligo.config.validate import findings as config_findings
from fuligo.errors import ConfigError
from fuligo.planner.rules import RULES
from fuligo.planner.rules.rule import Fix
from fuligo.planner.subject import Subject

MAX_TRIES = 12
"""Fixes that are tried for one finding."""
MAX_COMPARED = 3
"""Fixes that mend a finding, of which the best is shown."""

NOTHING_TRIED_HELPS = "no change of these flags that was tried keeps all rules"
MEND_OTHERS_FIRST = f"mend what else is wrong first: with that, {NOTHING_TRIED_HELPS}"


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding and the fixes to try for it."""

    finding: Finding
    fixes: tuple[Fix, ...]


def check(subject: Subject) -> tuple[Finding, ...]:
    """Everything that the rules find, errors first; each fix was applied and mends its finding without breaking another rule."""
    found = _broken(subject)
    known = Counter(each.finding.id for each in found)
    return tuple(_with_tried_fix(each, subject, known) for each in found)


def broken_rules(subject: Subject) -> tuple[Finding, ...]:
    """As `check`, faster: no fix is tried, and none is shown."""
    return tuple(replace(each.finding, fix=()) for each in _broken(subject))


def _broken(subject: Subject) -> list[_Found]:
    found = [_Found(finding, (finding.fix,) if finding.fix else ()) for finding in config_findings(subject.config)]
    found.extend(_planner_findings(subject))
    return sorted(_without_repeats(found), key=lambda each: each.finding.severity is not Severity.ERROR)


def _planner_findings(subject: Subject) -> Iterator[_Found]:
    for rule in RULES:
        for broken in rule.check(subject):
            finding = Finding(rule.id, rule.severity, broken.text, broken.flags or rule.flags, advice=broken.advice)
            yield _Found(finding, broken.fixes)


def _without_repeats(found: list[_Found]) -> Iterator[_Found]:
    """Groups of engines that share a flag break a rule together: once is enough."""
    seen: set[str] = set()
    for each in found:
        key = repr((each.finding.id, each.fixes[0] if each.fixes else each.finding.text))
        if key not in seen:
            seen.add(key)
            yield each


def _with_tried_fix(each: _Found, subject: Subject, known: Counter[str]) -> Finding:
    """The first fix that mends the finding; of the first few that do, the one that mends most of the others with it."""
    best, most_mended = (), 0
    num_compared = 0
    for fix in each.fixes[:MAX_TRIES]:
        num_mended = _num_mended(fix, each.finding.id, subject, known)
        if num_mended > most_mended:
            best, most_mended = fix, num_mended
        num_compared += bool(num_mended)
        if most_mended == known.total() or num_compared == MAX_COMPARED:
            break
    why_none = MEND_OTHERS_FIRST if known.total() > 1 else NOTHING_TRIED_HELPS
    advice = each.finding.advice or ("" if best else why_none)
    return replace(each.finding, fix=best, advice=advice)


def _num_mended(fix: Fix, rule_id: str, subject: Subject, known: Counter[str]) -> int:
    """Findings that the changed config is free of; 0 where this one is still there, or another is new."""
    try:
        changed = replace(subject, config=apply_changes(subject.config, fix))
    except ConfigError:
        return 0
    left = Counter(each.finding.id for each in _broken(changed))
    return known.total() - left.total() if left[rule_id] < known[rule_id] and not left - known else 0
