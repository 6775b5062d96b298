"""Training jobs among the recorded commands: `python3 train.py ...`, alone, under a launcher, or behind `ray job submit ... --`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import yaml

from fuligo.errors import ConfigError

_TRAINING_MODULES = {"train": False, "train_async": True}
"""Names of slime's programs, and whether they train one rollout behind the engines."""
_INTERPRETERS = re.compile(r"(python(3(\.\d+)?)?|torchrun)$")
_NO_LAUNCHERS = frozenset({"ssh", "pdsh", "scp", "rsync", "pkill", "killall", "pgrep", "git"})
"""Commands that name a program and do not run it here."""
_RAY_SWITCHES = ("--no-wait", "--verbose")
"""Options of `ray job submit` without a value; all others take one."""


@dataclass(frozen=True, slots=True)
class Training:
    """A command that trains."""

    arguments: tuple[str, ...]
    is_async: bool = False
    """The program is `train_async.py`."""
    is_slime: bool = True
    """slime's defaults hold; false for `fuligo train`."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A `ray job submit`."""

    environment: dict[str, str]
    """`env_vars` of `--runtime-env-json`."""
    environment_file: str | None
    """Value of `--runtime-env`: a file of YAML or JSON."""
    entrypoint: tuple[str, ...]


def training(words: Sequence[str]) -> Training | None:
    """Return the training job that a command starts, None where it starts none."""
    if PurePosixPath(words[0]).name == "fuligo":
        return Training(tuple(words[2:]), is_slime=False) if words[1:2] == ("train",) else None
    if PurePosixPath(words[0]).name in _NO_LAUNCHERS:
        return None
    start = next((index for index, word in enumerate(words) if _INTERPRETERS.match(PurePosixPath(word).name)), None)
    if start is None:
        return None
    for index, word in enumerate(words[start + 1 :], start + 1):
        rest = tuple(words[index + 1 :])
        if words[index - 1] == "-m" and word == "fuligo":
            return Training(rest[1:], is_slime=False) if rest[:1] == ("train",) else None
        module = word.rpartition(".")[2] if words[index - 1] == "-m" else PurePosixPath(word).name.removesuffix(".py")
        is_program = word.endswith(".py") or words[index - 1] == "-m"
        if is_program and module in _TRAINING_MODULES:
            return Training(rest, is_async=_TRAINING_MODULES[module])
        if word.endswith(".py"):
            return None
    return None


def conversion(words: Sequence[str]) -> str | None:
    """Return the script of a command that converts a checkpoint, None for another command."""
    return next((word for word in words if re.search(r"(^|/)convert_\w+\.py$", word)), None)


def submission(words: Sequence[str]) -> Submission | None:
    """Return the job that a command submits, None for another command.

    Raises:
        ConfigError: an option without a value, no command, or an environment that is not JSON.
    """
    if tuple(words[:3]) != ("ray", "job", "submit"):
        return None
    rest = list(words[3:])
    environment: dict[str, str] = {}
    file = None
    while rest and rest[0].startswith("--") and rest[0] != "--":
        option, equals, value = rest.pop(0).partition("=")
        if option not in _RAY_SWITCHES and not equals:
            if not rest:
                raise ConfigError(f"ray job submit: {option} has no value")
            value = rest.pop(0)
        if option == "--runtime-env-json":
            environment = declared_environment(value)
        elif option == "--runtime-env":
            file = value
    entrypoint = tuple(rest[1:] if rest[:1] == ["--"] else rest)
    if not entrypoint:
        raise ConfigError("ray job submit has no command after `--`")
    return Submission(environment, file, entrypoint)


def declared_environment(text: str) -> dict[str, str]:
    """Return `env_vars` of a runtime environment, JSON or YAML.

    Raises:
        ConfigError: it is malformed.
    """
    if not text.strip():
        return {}
    try:
        parsed = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (json.JSONDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the runtime environment is not valid ({' '.join(str(error).split())}): {' '.join(text.split())[:200]}"
        ) from None
    variables = parsed.get("env_vars", {}) if isinstance(parsed, dict) else None
    if not isinstance(variables, dict):
        raise ConfigError("the runtime environment must hold env_vars, an object of names and texts")
    return {str(name): str(value) for name, value in variables.items()}
