"""Check that the flags of a config fit together. `fuligo.cli.preflight` checks the files that they name."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fuligo.config import Config
from fuligo.config.changes import change_text
from fuligo.config.findings import Change, Finding, Rule, Severity, errors_first, rules_of
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
    """Check all rules, raise the errors as one ConfigError, and return the warnings, one line each.

    `places`: file and line of the flags that the config file sets, as in `Parsed`.
    """
    return require_no_errors(with_places(findings(config), places or {}), config)


def require_no_errors(found: Iterable[Finding], config: Config) -> list[str]:
    """Raise the errors among the findings as one ConfigError, and return the warnings, one line each."""
    lines: dict[Severity, list[str]] = {severity: [] for severity in Severity}
    for finding in found:
        lines[finding.severity].append(described(finding, config))
    if lines[Severity.ERROR]:
        raise ConfigError(*lines[Severity.ERROR])
    return lines[Severity.WARNING]


def findings(config: Config) -> tuple[Finding, ...]:
    """Return the findings of all rules, errors first."""
    return errors_first(replace(rule.finding(violation), fix=violation.fix) for rule in RULES for violation in rule.check(config))


def with_places(found: Iterable[Finding], places: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return the findings, each with the places of its flags in the config file (`Parsed.places`), since the flags were not typed."""

    def with_places_of(finding: Finding) -> Finding:
        named = [option for option in finding.flags if option in places and re.search(rf"{option}(?![\w-])", finding.text)]
        if not named:
            return finding
        shown = places[named[0]] if len(named) == 1 else "; ".join(f"{option}: {places[option]}" for option in named)
        return replace(finding, text=f"{finding.text} ({shown})")

    return tuple(map(with_places_of, found))


def described(finding: Finding, config: Config) -> str:
    """Return a finding as one line: the problem, then the remedies, such as `drop --lr, and use --seed 1, --colocate and --use-tis`."""
    by_verb: dict[str, list[str]] = {}
    for change in finding.fix:
        text = change_text(change, config)
        verb = "use " if text.startswith("--") else "drop " if text.startswith("drop ") else ""
        by_verb.setdefault(verb, []).append(text.removeprefix(verb))
    fix = ", and ".join(f"{verb}{' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}" for verb, texts in by_verb.items())
    remedies = [remedy for remedy in (fix, finding.advice) if remedy]
    return "; ".join([finding.text.removesuffix("."), *remedies]) if remedies else finding.text
