"""Check that the flags of a config fit together. `fuligo.cli.preflight` checks the files that they name."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fuligo.config import Config
from fuligo.config.changes import change_text
from fuligo.config.findings import Change, Finding, Rule, Severity, rules_of
from fuligo.config.rules import (
    advice,
    cluster,
    combinations,
    distillation,
    effects,
    exactness,
    fp8_training,
    lora,
    required,
    routing_replay,
    sizes,
    vision,
)
from fuligo.errors import ConfigError

_MODULES = (required, combinations, cluster, sizes, routing_replay, distillation, lora, fp8_training, vision, exactness, effects, advice)
RULES: tuple[Rule[Config, Change], ...] = rules_of(_MODULES)
"""All rules that need no facts about the model or the GPUs. The docstring of a rule's `check` gives its reason."""


def validate(config: Config, places: Mapping[str, str] | None = None) -> list[str]:
    """Check all rules.

    Args:
        places: file and line of the flags that the config file sets, as in `Parsed`.

    Returns:
        The warnings, one line each.

    Raises:
        ConfigError: the errors, one line each.
    """
    return require_no_errors(with_places(findings(config), places or {}), config)


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
    found = [replace(rule.finding(violation), fix=violation.fix) for rule in RULES for violation in rule.check(config)]
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.ERROR))


def with_places(found: Iterable[Finding], places: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return the findings, each with the places of its flags in the config file, since the flags were not typed.

    Args:
        places: file and line by option, as in `Parsed`.
    """
    return tuple(_with_places(finding, places) for finding in found)


def _with_places(finding: Finding, places: Mapping[str, str]) -> Finding:
    named = [option for option in finding.flags if option in places and re.search(rf"{option}(?![\w-])", finding.text)]
    if not named:
        return finding
    shown = places[named[0]] if len(named) == 1 else "; ".join(f"{option}: {places[option]}" for option in named)
    return replace(finding, text=f"{finding.text} ({shown})")


def described(finding: Finding, config: Config) -> str:
    """Return a finding as one line: the problem, then the remedies."""
    fix = _fix_text(change_text(change, config) for change in finding.fix)
    remedies = list(filter(None, [fix, finding.advice]))
    return "; ".join([finding.text.removesuffix("."), *remedies]) if remedies else finding.text


def _fix_text(changes: Iterable[str]) -> str:
    """Join changes of `change_text` by their verbs: `drop --lr, and use --seed 1, --colocate and --use-tis`."""
    by_verb: dict[str, list[str]] = {}
    for change in changes:
        verb = "use " if change.startswith("--") else "drop " if change.startswith("drop ") else ""
        by_verb.setdefault(verb, []).append(change.removeprefix(verb))
    return ", and ".join(f"{verb}{' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}" for verb, texts in by_verb.items())
