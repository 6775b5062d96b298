"""Changes of single values: applied to a config, and written as a user would type them."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from fuligo.config import Config
from fuligo.config.findings import Change
from fuligo.config.flag import PREFIXES, option_name
from fuligo.errors import ConfigError


def apply_changes(config: Config, changes: Sequence[Change]) -> Config:
    """Return the config with these values, applied in order; None restores a flag's default and removes a passed-through argument.

    Raises ConfigError if values have the wrong type or are out of range, or the config has no such entries; one text each.
    """
    values = config.model_dump()
    missing = [
        f"cannot apply `{change_text(change, config)}`: the config has no such entry" for change in changes if not _assign(values, change)
    ]
    if missing:
        raise ConfigError(*missing)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = {f"{'.'.join(map(str, details['loc']))}: {details['input']!r} is not valid: {details['msg']}" for details in error.errors()}
        raise ConfigError(*sorted(found)) from None


def change_text(change: Change, config: Config | None = None) -> str:
    """Return a change as text: `--sglang-dp-size 6`, `drop --rollout-num-gpus`, `sglang_config: model default, group 2: num_gpus 192`.

    `config`: the config to change, for the names of its models; without it they are numbered from 1.
    """
    group, name, *inner = change.path
    if name == "sglang_config" and inner:
        return f"sglang_config: {_place(inner, config)} {_plain(change.value)}"
    if (group, name) == ("cluster", "env") and inner and change.value is not None:
        return f"--env {_plain({inner[0]: change.value})}"  # --env adds to the environment of the config file
    if inner:
        where = ".".join(map(str, inner))
        return f"{group}.{name}: drop {where}" if change.value is None else f"{group}.{name}: {where} {_plain(change.value)}"
    option = option_name(PREFIXES.get(str(group), "") + str(name))
    if change.value is None:
        return f"drop {option}"
    if isinstance(change.value, bool):
        return option if change.value else option_name(f"no_{PREFIXES.get(str(group), '')}{name}")
    return f"{option} {_plain(change.value)}"


def _assign(values: Any, change: Change) -> bool:
    """Change `values` in place; return False if they have no such entry."""
    *parents, last = change.path
    try:
        for step in parents:
            if values[step] is None:
                values[step] = {}
            values = values[step]
        if isinstance(values, list):
            if change.value is None:
                del values[int(last)]
            else:
                values[int(last)] = change.value
        elif change.value is None:
            values.pop(last, None)
        else:
            values[last] = change.value
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return True


def _place(inner: Sequence[str | int], config: Config | None) -> str:
    """Return `model default, group 2: overrides.deepep_mode` for the path `0, server_groups, 1, overrides, deepep_mode`."""
    number, rest = int(inner[0]), inner[1:]
    models = config.engine.sglang_config if config is not None else None
    place = f"model {models[number].name}" if models and number < len(models) else f"model {number + 1}"
    if len(rest) >= 2 and rest[0] == "server_groups":
        place, rest = f"{place}, group {int(rest[1]) + 1}", rest[2:]
    return f"{place}: {'.'.join(map(str, rest))}"


def _plain(value: object) -> str:
    if value is None:
        return "dropped"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    return " ".join(shlex.quote(str(each)) for each in (value if isinstance(value, list | tuple) else [value]))
