"""Parser of the arguments of `fuligo train`.

Syntax: `--name value` or `--name=value`; a bare `--name` or `--no-name` for true and false; several values for a list; JSON where the
flag takes an object. `--env NAME` copies a variable from the environment of the command.
A value may begin with one dash (`--rollout-top-k -1`); write one that begins with two after `=`.
`none` is None if the flag allows it, else it resets the flag to its default. `--name=[...]` is a list as JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuligo.config import Config
from fuligo.config.assignments import ADDED, Assignment, Given, anchored, build_config, file_places, invalid_value, override, unset_value
from fuligo.config.files import read_yaml
from fuligo.config.flag import PREFIXES, Flag, Kind
from fuligo.config.flags import flags, option_name, refusal, suggest_options
from fuligo.config.other_frameworks import elsewhere, value_elsewhere
from fuligo.config.passthrough import deprecation
from fuligo.config.rules import effects
from fuligo.config.schemas import BACKENDS, RESERVED, schema
from fuligo.config.secret import hide_credentials, is_secret_option
from fuligo.config.topology_file import read_topology
from fuligo.errors import ConfigError

CONFIG_OPTION = "--config"
_BOOLEANS = {"true": True, "false": False}


@dataclass(slots=True)
class CommandLine(Given):
    """Assignments, problems and warnings of a command line."""

    config_file: str | None = None
    """Value of `--config`; None if it is not given."""


@dataclass(slots=True)
class _Occurrence:
    option: str
    values: list[str]
    attached: bool
    """True if written as `--name=value`."""

    @property
    def is_secret(self) -> bool:
        return is_secret_option(self.option.removeprefix("--").replace("-", "_"))

    def shown(self, text: str) -> str:
        """Return `text`, which contains values, for a message; `(not shown)` if the values are secret."""
        return "(not shown)" if self.is_secret else hide_credentials(text)

    def __str__(self) -> str:
        if not self.values:
            return self.option
        return f"{self.option}={self.shown(self.values[0])}" if self.attached else f"{self.option} {self.shown(' '.join(self.values))}"


@dataclass(frozen=True, slots=True)
class _Meaning:
    """Flag that an option stands for."""

    flag: Flag
    value: Any = None
    """Value of the bare option, if it stands for one: False for `--no-name`."""
    warning: str | None = None
    """Warning to show when the option is used; None if there is none."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Config whose single values are valid; `fuligo.config.validate` checks that they fit together."""

    config: Config
    warnings: tuple[str, ...]
    places: Mapping[str, str] = field(default_factory=dict)
    """Place in the config file of each flag that the command line does not set: `--lr` -> `run.yaml line 7`."""


class _Problem(Exception):
    """Raised for a wrong argument; caught in this module."""


def parse(arguments: Sequence[str]) -> Parsed:
    """Parse the arguments of `fuligo train`: defaults, then the `--config` file, then the flags.

    Raises a ConfigError that names all unknown flags or keys, and values of the wrong type or range, each with its fix.
    """
    line = read_command_line(arguments)
    file = read_yaml(Path(line.config_file)) if line.config_file is not None else Given()
    return combine(file, line)


def combine(file: Given, line: Given) -> Parsed:
    """Build the config of a file and the flags that override it. Raises a ConfigError that names all problems.

    Flags of the file that lost their effect to the others (`kl_loss_coef` to `--no-use-kl-loss`) are unset, with a warning per rule. Those
    that have no effect in the file by itself stay: they are mistakes, which the run reports.
    """
    given, places = override(file, line), file_places(file, line)
    config = build_config(given.assignments, given.problems)
    parsed = Parsed(config, tuple(given.warnings), places)
    if not places or not line.assignments:
        return parsed
    try:
        alone = build_config(file.assignments)
    except ConfigError:  # the command line corrects a value of the file
        return parsed
    idle_alone = {option for rule in effects.RULES for violation in rule.check(alone) for option in violation.flags}
    lost = places.keys() - idle_alone
    config, dropped = effects.without_idle(config, lambda each: lost.issuperset(each.flags))
    idle = [f"left out: {each.text} ({'; '.join(places[option] for option in each.flags)})" for each in dropped]
    return Parsed(config, (*given.warnings, *idle), places)


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Read the arguments. Never raises: errors are in `problems`, one text each."""
    result = CommandLine()
    first_seen: dict[str, _Occurrence] = {}
    for occurrence in _occurrences(arguments, result.problems):
        try:
            if occurrence.option == CONFIG_OPTION:
                name, result.config_file = CONFIG_OPTION, _single(occurrence, "the name of a YAML file")
            else:
                meaning = _meaning(occurrence.option)
                name = meaning.flag.flat_name
                value = anchored(meaning.flag, _value(meaning, occurrence, result), Path())
                result.assignments.append(Assignment(meaning.flag, value, occurrence.option))
                result.warnings += [meaning.warning] if meaning.warning else []
        except _Problem as problem:
            result.problems.append(str(problem))
            continue
        if name in first_seen and name not in ADDED:
            result.warnings.append(f"given twice: {first_seen[name]}, then {occurrence}; the last one is used")
        first_seen[name] = occurrence
    return result


def _occurrences(arguments: Sequence[str], problems: list[str]) -> list[_Occurrence]:
    found: list[_Occurrence] = []
    for token in arguments:
        if token.startswith("--"):
            option, equals, value = token.partition("=")
            found.append(_Occurrence(option.replace("_", "-"), [value] if equals else [], attached=bool(equals)))
        elif not found or found[-1].attached:
            shown = found[-1].shown(repr(token)) if found else repr(token)
            name, _, value = token.partition("=")
            meant = elsewhere(name) or value_elsewhere(name, value) or suggest_options(token)
            is_file = token.endswith((".yaml", ".yml"))
            problems.append(f"{shown} follows no flag{f'; did you mean {CONFIG_OPTION} {token}?' if is_file else meant}")
        else:
            found[-1].values.append(token)
    return found


def _meaning(option: str) -> _Meaning:
    """Find the flag: a typed one, else a pass-through argument, else the negation of either.

    Raises _Problem if there is none, or fuligo sets the argument itself.
    """
    name = option.removeprefix("--").replace("-", "_")
    if name in flags():
        return _Meaning(flags()[name])
    group = next((group for group, prefix in PREFIXES.items() if name.startswith(prefix)), "megatron")
    bare = name.removeprefix(PREFIXES.get(group, ""))
    backend = schema(group)
    if (refused := refusal(backend, bare)) is not None:
        raise _Problem(f"{option}: {refused}")
    alias = backend.aliases.get(bare)
    if (flag := backend.flags.get(backend.canonical(bare))) is not None:
        warning = deprecation(backend, bare, lambda name: option_name(PREFIXES.get(group, "") + name))
        return _Meaning(flag, alias.value if alias else None, warning)
    negated = _negated(name)
    if negated is None:
        raise _Problem(f"unknown flag {option}{_instead(name)}")
    return _Meaning(negated, value=False)


def flag_of_option(option: str) -> Flag:
    """Return the flag of an option with a value: `--lr`, `--sglang-dp-size`.

    Raises ConfigError for an unknown flag, or an option that stands for one value (`--no-name`).
    """
    try:
        meaning = _meaning(option)
    except _Problem as problem:
        raise ConfigError(str(problem)) from None
    if meaning.value is not None:
        raise ConfigError(f"{option} takes no value; use {meaning.flag.option}")
    return meaning.flag


def _instead(name: str) -> str:
    """Return the remedy to append to the error for an unknown flag: a suggestion, or where the flags are listed."""
    for group in BACKENDS:
        argument = schema(group).canonical(name)
        if argument in RESERVED[group]:
            reserved = f"; {schema(group).backend}'s {argument}: {RESERVED[group][argument]}"
            break
    else:
        reserved = "; fuligo train --help lists the flags"
    return elsewhere(name) or suggest_options(name) or reserved


def _negated(name: str) -> Flag | None:
    """Return the switch that `no_name` turns off; None if there is none. `no_` may come before or after a pass-through prefix."""
    for prefix in ("", *PREFIXES.values()):
        if name.startswith(f"{prefix}no_"):
            try:
                flag = _meaning(option_name(prefix + name.removeprefix(f"{prefix}no_"))).flag
            except _Problem:
                continue
            return flag if flag.kind is Kind.BOOL else None
    return None


def _value(meaning: _Meaning, occurrence: _Occurrence, result: CommandLine) -> Any:
    flag = meaning.flag
    if meaning.value is not None:
        if occurrence.values:
            raise _Problem(f"{occurrence.option} takes no value, got {occurrence.shown(repr(' '.join(occurrence.values)))}")
        return meaning.value
    # `none` unsets a flag, except where it is a valid value, such as for the text of a backend.
    if occurrence.values == ["none"] and "none" not in flag.choices and not (flag.group in BACKENDS and flag.kind is Kind.TEXT):
        return unset_value(flag)
    if flag.kind is Kind.BOOL:
        return _boolean(flag, occurrence)
    if flag.kind.is_list:
        if not occurrence.values:
            raise _Problem(f"{occurrence.option} needs at least one value; for an empty list, write {occurrence.option}=[]")
        if occurrence.attached and occurrence.values[0].startswith("["):
            return _json(flag, occurrence.values[0])
        return occurrence.values
    text = _single(occurrence, f"a value: {flag.rule}")
    if flag.kind is Kind.TEXT and flag.optional and text == "":
        return None
    if flag.kind is Kind.TOPOLOGY:
        topology = read_topology(Path(text))
        result.warnings += topology.warnings
        if topology.problems:
            *others, last = topology.problems
            result.problems += others
            raise _Problem(last)
        return topology.models
    return _json(flag, text) if flag.kind.is_json else text


def _single(occurrence: _Occurrence, wanted: str) -> str:
    if not occurrence.values:
        raise _Problem(f"{occurrence.option} needs {wanted}")
    if len(occurrence.values) > 1:
        meant = next((suggest_options(value) for value in occurrence.values if value.startswith("-")), "")
        # Values in verl's form of settings have no dashes: `trainer.nnodes=2`.
        names = [name for name, equals, _ in (value.partition("=") for value in occurrence.values[1:]) if equals and "." in name]
        meant = meant or "".join(f"; {name}: {elsewhere(name).removeprefix('; ')}" for name in names)
        raise _Problem(
            f"{occurrence.option} takes one value, got {len(occurrence.values)}: {occurrence.shown(' '.join(occurrence.values))}{meant}"
        )
    return occurrence.values[0]


def _boolean(flag: Flag, occurrence: _Occurrence) -> bool:
    if not occurrence.values:
        return True
    text = _single(occurrence, flag.rule).lower()
    if text not in _BOOLEANS:
        hint = f"; for false write {option_name('no_' + flag.flat_name)}" + suggest_options(text)
        raise _Problem(invalid_value(flag, occurrence.values[0], occurrence.option) + hint)
    return _BOOLEANS[text]


def _json(flag: Flag, text: str) -> Any:
    if flag.name in ADDED and text.isidentifier():
        return {text: f"${{{text}}}"}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = "the value" if flag.is_secret else repr(text)
        like = """, such as '{"NAME": "VALUE"}'""" if flag.name in ADDED else ""
        raise _Problem(
            f"{flag.option}: {shown} is not JSON ({error}); it must be {flag.rule}, in single quotes for the shell{like}"
        ) from None
