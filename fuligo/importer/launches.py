"""Recognises the start of a training job: `python3 train.py ...`, alone or behind `ray job submit ... --`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import yaml

TRAINING_SCRIPTS = {"train.py": (), "train_async.py": ("--async-mode", "one-step")}
"""Script -> flags that stand for it."""
_INTERPRETERS = re.compile(r"python(3(\.\d+)?)?$")
_RAY_FLAGS = ("--no-wait", "--verbose")
"""Options of `ray job submit` without a value; all others have one."""


class LaunchError(Exception):
    """A start that cannot be read; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Submission:
    """`ray job submit`."""

    environment: dict[str, str]
    environment_file: str | None
    """Of `--runtime-env`: YAML or JSON, to be read by the caller."""
    entrypoint: tuple[str, ...]


def training_arguments(words: Sequence[str]) -> tuple[str, ...] | None:
    """The flags of a command that trains; None for another command."""
    name = PurePosixPath(words[0]).name
    if name == "fuligo" and words[1:2] == ["train"]:
        return tuple(words[2:])
    if _INTERPRETERS.match(name) is None and name != "torchrun":
        return None
    rest = list(words[1:])
    for index, word in enumerate(rest):
        if PurePosixPath(word).name in TRAINING_SCRIPTS:
            return (*rest[index + 1 :], *TRAINING_SCRIPTS[PurePosixPath(word).name])
        if word == "-m" and rest[index + 1 : index + 3] == ["fuligo", "train"]:
            return tuple(rest[index + 3 :])
        if word.endswith(".py"):
            return None
    return None


def submission(arguments: Sequence[str]) -> Submission:
    """What stands behind `ray job submit`.

    Raises:
        LaunchError: no `--`, an unknown option, or an environment that is not JSON.
    """
    rest = list(arguments)
    environment: dict[str, str] = {}
    environment_file = None
    while rest and rest[0] != "--":
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--"):
            rest.insert(0, option + equals + value)
            break
        if option not in _RAY_FLAGS and not equals:
            if not rest:
                raise LaunchError(f"ray job submit: {option} has no value")
            value = rest.pop(0)
        if option == "--runtime-env-json":
            environment = declared_environment(value)
        elif option == "--runtime-env":
            environment_file = value
    entrypoint = tuple(rest[1:] if rest[:1] == ["--"] else rest)
    if not entrypoint:
        raise LaunchError("ray job submit: there is no command behind `--`")
    return Submission(environment, environment_file, entrypoint)


def declared_environment(text: str) -> dict[str, str]:
    """`env_vars` of a runtime environment, JSON or YAML.

    Raises:
        LaunchError: malformed.
    """
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{"):
            raise LaunchError(f"the runtime environment is not JSON ({error}): {' '.join(text.split())[:200]}") from None
        parsed = _yaml(text)
    variables = parsed.get("env_vars", {}) if isinstance(parsed, dict) else None
    if not isinstance(variables, dict):
        raise LaunchError("the runtime environment must hold env_vars, an object of names and texts")
    return {str(name): str(value) for name, value in variables.items()}


def _yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LaunchError(f"the runtime environment is not YAML: {' '.join(str(error).split())}") from None
