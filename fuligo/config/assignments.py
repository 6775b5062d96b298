"""Values that somebody gave to flags, and the Config that they make."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fuligo.config import Config
from fuligo.config.flag import Flag
from fuligo.config.values import invalid_reason
from fuligo.errors import ConfigError

ADDED = ("env",)
"""Flags where a later value adds to an earlier one: one variable on the command line must not drop the environment block of a file."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One flag with the value that it is to have."""

    flag: Flag
    value: Any
    """As given: text from a command line, a YAML value from a file. Checked by `build_config`."""
    origin: str
    """Where it was given, for error messages: `--lr`, or `run.yaml line 7, optimizer.lr`."""


@dataclass(slots=True)
class Given:
    """What a command line or a file says."""

    assignments: list[Assignment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is wrong with it, one text each."""
    warnings: list[str] = field(default_factory=list)


def build_config(assignments: Iterable[Assignment], problems: Iterable[str] = ()) -> Config:
    """The Config with these values and the defaults of all other flags; of two assignments of one flag the last counts (see `ADDED`).

    Args:
        problems: what was already found wrong where the assignments come from.

    Raises:
        ConfigError: the problems, and values of the wrong type or outside their range, all of them at once.
    """
    last: dict[tuple[str, str], Assignment] = {}
    for assignment in assignments:
        key = (assignment.flag.group, assignment.flag.name)
        last[key] = _added(last[key], assignment) if key in last and assignment.flag.name in ADDED else assignment
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for (group, name), assignment in last.items():
        values[group][name] = assignment.value
    found = list(problems)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        invalid = {_problem(details, last[str(details["loc"][0]), str(details["loc"][1])]) for details in error.errors()}
        raise ConfigError(*found, *sorted(invalid)) from None
    if found:
        raise ConfigError(*found)
    return config


def _added(before: Assignment, after: Assignment) -> Assignment:
    both = isinstance(before.value, dict) and isinstance(after.value, dict)
    return replace(after, value={**before.value, **after.value}) if both else after


def invalid_value(flag: Flag, value: Any, origin: str) -> str:
    """The error text for a value that breaks the flag's rule."""
    return f"{origin}: {invalid_reason(flag, value)}"


def anchored(flag: Flag, value: Any, base: Path) -> Any:
    """Paths that begin with `./` or `../`, from `base`; all other values as they are.

    The result begins with neither, so that it means the same wherever the config is written and read again.
    """
    if not flag.is_path:
        return value
    if isinstance(value, list):
        return [anchored_path(entry, base) for entry in value]
    return anchored_path(value, base)


def anchored_path(value: Any, base: Path) -> Any:
    """The same for one path; what is no text is left to whoever checks types."""
    if not isinstance(value, str) or not value.startswith(("./", "../")):
        return value
    joined = os.path.normpath(base / value)
    return os.path.abspath(joined) if joined.startswith("..") else joined  # noqa: PTH100 - resolves no links


def _problem(details: ErrorDetails, assignment: Assignment) -> str:
    if details["type"] == "argument":
        return f"{assignment.origin}: {details['msg']}"
    return invalid_value(assignment.flag, details["input"], assignment.origin)
