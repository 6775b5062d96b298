"""Settings of `config.yaml` by flat name, and their differences between runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fuligo.config.yaml_text import load, read_yaml_text

Settings = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting in several runs."""

    group: str
    name: str
    values: tuple[str, ...]
    """Values by run, as in the file; `–` if a run lacks the setting."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings by `group.name`, without validation, so that files of other versions can be read; empty if the file cannot."""
    try:
        document = load(read_yaml_text(path))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    settings: dict[str, Any] = {}
    for group, values in document.items() if isinstance(document, dict) else ():
        if isinstance(values, dict):
            settings.update({f"{group}.{name}": value for name, value in values.items()})
        else:
            settings[f".{group}"] = values
    return settings


def setting_rows(runs: Sequence[Mapping[str, Any]]) -> list[SettingRow]:
    """Return the settings of all runs, in the order of the files."""
    rows: list[SettingRow] = []
    for name in dict.fromkeys(name for settings in runs for name in settings):
        group, _, key = name.partition(".")
        rows.append(SettingRow(group, key, tuple(_text(settings[name]) if name in settings else "–" for settings in runs)))
    return rows


def differences(runs: Sequence[Mapping[str, Any]]) -> list[SettingRow]:
    """Return the settings that differ between runs."""
    return [row for row in setting_rows(runs) if len(set(row.values)) > 1]


def _text(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
