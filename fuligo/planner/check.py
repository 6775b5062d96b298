"""Check of all rules, with a tested fix for each finding."""

from collections import Counter
from dataclasses import dataclass, replace

from fuligo.config.changes import apply_changes
from fuligo.config.findings import Finding, Severity
from fuligo.config.validate import findings as config_findings
from fuligo.errors import ConfigError
from fuligo.planner.rules import RULES
from fuligo.planner.rules.rule import Fix
from fuligo.planner.subject import Subject

MAX_TRIES = 12
"""Maximum number of fixes to test for a finding."""
MAX_COMPARED = 3
"""Maximum number of fixes that resolve a finding to compare; the one that resolves most findings is chosen."""

NO_FIX_FOUND = "no change of these flags that was tried satisfies all rules"
FIX_OTHERS_FIRST = f"fix the other findings first: with them, {NO_FIX_FOUND}"


@dataclass(frozen=True, slots=True)
class _Found:
    """Finding with the fixes to try for it."""

    finding: Finding
    fixes: tuple[Fix, ...]


def check(subject: Subject) -> tuple[Finding, ...]:
    """Return the findings of all rules, errors first; each fix was tested to resolve its finding without violating another rule."""
    found = _find(subject)
    known = Counter(each.finding.id for each in found)
    return tuple(_with_tried_fix(each, subject, known) for each in found)


def violations(subject: Subject) -> tuple[Finding, ...]:
    """Return the findings as `check` does, but without fixes, which is faster."""
    return tuple(replace(each.finding, fix=()) for each in _find(subject))


def _find(subject: Subject) -> list[_Found]:
    """Return the findings, errors first. Violations of one rule with the same first fix, as by several engine groups, are one finding."""
    found = [_Found(finding, (finding.fix,) if finding.fix else ()) for finding in config_findings(subject.config)]
    for rule in RULES:
        found += [_Found(rule.finding(violation), violation.fix) for violation in rule.check(subject)]
    once: dict[str, _Found] = {}
    for each in found:
        once.setdefault(repr((each.finding.id, each.fixes[0] if each.fixes else each.finding.text)), each)
    return sorted(once.values(), key=lambda each: each.finding.severity is not Severity.ERROR)


def _with_tried_fix(each: _Found, subject: Subject, known: Counter[str]) -> Finding:
    """Return the finding with a tested fix: among the first that resolve it, the one that resolves most findings."""
    best, most_resolved = (), 0
    num_compared = 0
    for fix in each.fixes[:MAX_TRIES]:
        num_resolved = _num_resolved(fix, each.finding.id, subject, known)
        if num_resolved > most_resolved:
            best, most_resolved = fix, num_resolved
        num_compared += bool(num_resolved)
        if most_resolved == known.total() or num_compared == MAX_COMPARED:
            break
    why_none = FIX_OTHERS_FIRST if known.total() > 1 else NO_FIX_FOUND
    advice = each.finding.advice or ("" if best else why_none)
    config = subject.config
    # The removal of a flag that is not given is left out.
    fix = tuple(change for change in best if change.value is not None or apply_changes(config, [change]) != config)
    return replace(each.finding, fix=fix, advice=advice)


def _num_resolved(fix: Fix, rule_id: str, subject: Subject, known: Counter[str]) -> int:
    """Return how many findings the fix resolves; 0 if this one remains or a new one appears."""
    try:
        changed = replace(subject, config=apply_changes(subject.config, fix))
    except ConfigError:
        return 0
    left = Counter(each.finding.id for each in _find(changed))
    return known.total() - left.total() if left[rule_id] < known[rule_id] and not left - known else 0
