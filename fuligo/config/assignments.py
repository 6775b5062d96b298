"""Assignments of values to flags, and the Config built from them."""

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fuligo.config import Config
from fuligo.config.flag import Flag, Kind
from fuligo.config.other_frameworks import value_elsewhere
from fuligo.config.schemas import BACKENDS
from fuligo.config.values import invalid_reason
from fuligo.errors import ConfigError

ADDED = ("env", "engine_env")
"""Flags whose values are merged, so that a variable on the command line does not drop the environment of the config file."""

UNSET = object()
"""Value that resets a flag to its default: `none` on the command line and None from Python, if the flag does not allow None."""
ALTERNATIVES = (
    ("num_rollout", "num_epoch"),
    ("global_batch_size", "num_steps_per_rollout"),
    ("rm_type", "custom_rm_path"),
    ("opd_teacher_load", "opd_teacher_url"),
    ("only_train_params_name_list", "freeze_params_name_list"),
    ("debug_rollout_only", "debug_train_only"),
)
"""Flags that set the same thing: one on the command line replaces the other in the file."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One flag with its new value."""

    flag: Flag
    value: Any
    """Text from a command line or a YAML value from a file; `build_config` checks it."""
    origin: str
    """Place for error messages: `--lr`, or `run.yaml line 7, optimizer.lr`."""


@dataclass(slots=True)
class Given:
    """Assignments, problems and warnings read from a command line or a config file."""

    assignments: list[Assignment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def override(file: Given, line: Given) -> Given:
    """Merge the assignments of a file and a command line; the latter come last, and replace those of the file (see `ALTERNATIVES`)."""
    typed = {each.flag.name: each for each in line.assignments if _sets(each)}
    merged = Given(list(line.assignments), [*file.problems, *line.problems], [*file.warnings, *line.warnings])
    for assignment in reversed(file.assignments):
        others = [name for pair in ALTERNATIVES if assignment.flag.name in pair for name in pair]
        by = next((typed[name] for name in others if name in typed and assignment.flag.name not in typed), None)
        if by is None or not _sets(assignment):  # config.yaml of a run also lists unset flags, which need no warning
            merged.assignments.insert(0, assignment)
        else:
            merged.warnings.append(f"{by.origin} {by.value} replaces {assignment.origin}: {assignment.value}")
    return merged


def file_places(file: Given, line: Given) -> dict[str, str]:
    """Return the place of each option that only the file sets: `--lr` -> `run.yaml line 7`."""
    typed = {assignment.flag.option for assignment in line.assignments}
    places = {each.flag.option: each.origin.rpartition(", ")[0] for each in file.assignments}
    return {option: place for option, place in places.items() if option not in typed}


def _sets(assignment: Assignment) -> bool:
    """Return whether the assignment gives its flag a value other than None, false or `UNSET`."""
    return not any(assignment.value is nothing for nothing in (None, False, UNSET))


def build_config(assignments: Iterable[Assignment], problems: Iterable[str] = ()) -> Config:
    """Build the Config with these values and the defaults of all other flags; the last assignment of a flag wins (but see `ADDED`).

    Raises a ConfigError with the `problems` of reading the assignments, and all values of the wrong type or out of range.
    """
    last: dict[tuple[str, str], Assignment] = {}
    for assignment in assignments:
        key, before = (assignment.flag.group, assignment.flag.name), last.get((assignment.flag.group, assignment.flag.name))
        last[key] = assignment
        if before and assignment.flag.name in ADDED and isinstance(before.value, dict) and isinstance(assignment.value, dict):
            last[key] = replace(assignment, value={**before.value, **assignment.value})
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for (group, name), assignment in last.items():
        if assignment.value is not UNSET:
            # The word `none` means null, as on the command line, except where `none` is valid text or a choice.
            flag = assignment.flag
            plain = flag.optional and flag.kind is not Kind.TEXT and flag.group not in BACKENDS
            values[group][name] = None if (plain and assignment.value == "none" and "none" not in flag.choices) else assignment.value
    found = list(problems)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        invalid: set[str] = set()
        for details in error.errors():
            wrong = last[str(details["loc"][0]), str(details["loc"][1])]
            is_argument = details["type"] == "argument"
            invalid.add(f"{wrong.origin}: {details['msg']}" if is_argument else invalid_value(wrong.flag, details["input"], wrong.origin))
        raise ConfigError(*found, *sorted(invalid)) from None
    if found:
        raise ConfigError(*found)
    return config


def unset_value(flag: Flag) -> Any:
    """Return the value of a flag for `none` on the command line or None from Python: null if the flag allows it, else `UNSET`."""
    return None if flag.optional or flag.group in BACKENDS else UNSET


def invalid_value(flag: Flag, value: Any, origin: str) -> str:
    """Return the error text for a value that breaks the flag's rule."""
    return f"{origin}: {invalid_reason(flag, value)}{value_elsewhere(flag.name, value)}"


def anchored(flag: Flag, value: Any, base: Path) -> Any:
    """Resolve paths that begin with `./` or `../` from `base`; return all other values unchanged.

    The result never begins with `./` or `../`, so that it is not resolved again when the config is saved and read from another directory.
    """
    if not flag.is_path:
        return value
    return [anchored_path(entry, base) for entry in value] if isinstance(value, list) else anchored_path(value, base)


def anchored_path(value: Any, base: Path) -> Any:
    """Resolve one path as `anchored` does. Values that are not text are returned unchanged; the type check rejects them."""
    if not isinstance(value, str) or not value.startswith(("./", "../")):
        return value
    joined = os.path.normpath(base / value)
    return os.path.abspath(joined) if joined.startswith("..") else joined  # noqa: PTH100 - resolves no links
