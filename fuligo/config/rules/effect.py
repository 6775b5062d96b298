"""Flags that take effect only under a condition, and the rule that reports them otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.findings import Finding, Rule, Severity
from fuligo.config.flags import Flag, Kind, flags
from fuligo.config.rules.rule import unset_flag


@dataclass(frozen=True, slots=True)
class Effect:
    """Flags `names`, which take effect only if `condition` holds."""

    suffix: str
    """End of the rule's id: `CFG-NO-EFFECT-...`."""
    names: tuple[str, ...]
    condition: Callable[[Config], bool]
    otherwise: str
    """Circumstances without an effect: `without --use-tis`."""
    remedy: str
    """Remedy that gives them an effect: `add --use-tis`."""

    @property
    def id(self) -> str:
        """Stable name of the rule."""
        return f"CFG-NO-EFFECT-{self.suffix}"


def rules_of(effects: Sequence[Effect]) -> tuple[Rule[Config], ...]:
    """Return one rule per effect. A flag that is idle for two reasons is reported for the first."""
    return tuple(_rule(effect, effects[:number]) for number, effect in enumerate(effects))


def _rule(effect: Effect, earlier: Sequence[Effect]) -> Rule[Config]:
    def check(config: Config) -> Iterator[Finding]:
        if effect.condition(config):
            return
        # The default is the neutral value of each of these flags: coefficients 0, switches off, paths not given.
        changed = [name for name in effect.names if config.value_of(name) != flags()[name].default]
        names = [name for name in changed if not _is_reported(name, earlier, config)]
        if names:
            yield _finding(effect, config, names)

    check.__doc__ = f"{', '.join(flags()[name].option for name in effect.names)}: no effect {effect.otherwise}."
    return Rule(effect.id, check)


def _is_reported(name: str, effects: Sequence[Effect], config: Config) -> bool:
    """Return True if one of these effects already reports the flag."""
    return any(name in effect.names and not effect.condition(config) for effect in effects)


def _finding(effect: Effect, config: Config, names: list[str]) -> Finding:
    shown = [_shown(flags()[name], config.value_of(name)) for name in names]
    have, them = ("has", "it") if len(names) == 1 else ("have", "them")
    return Finding(
        id=effect.id,
        severity=Severity.ERROR,
        text=f"{' and '.join(shown)} {have} no effect {effect.otherwise}",
        flags=tuple(flags()[name].option for name in names),
        fix=tuple(unset_flag(name) for name in names),
        advice=f"to use {them}, {effect.remedy}",
    )


def _shown(flag: Flag, value: object) -> str:
    if flag.kind is Kind.BOOL:
        return flag.option
    return f"{flag.option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
