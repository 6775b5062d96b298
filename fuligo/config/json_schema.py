"""JSON schema of config files, for editors: completion, types, choices and descriptions (`fuligo schema`)."""

from typing import Any

from fuligo.config.flags import Flag, Kind, flags, passthrough_flags, sections
from fuligo.config.groups import GROUPS, group_doc
from fuligo.config.schemas import BACKENDS

_TYPES: dict[Kind, dict[str, Any]] = {
    Kind.BOOL: {"type": "boolean"},
    Kind.INT: {"type": "integer"},
    Kind.SIZE: {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)$"}]},
    Kind.FLOAT: {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"}]},
    Kind.TEXT: {"type": "string"},
    Kind.CHOICE: {},
    Kind.TEXT_LIST: {"type": "array", "items": {"type": "string"}},
    Kind.INT_LIST: {"type": "array", "items": {"type": "integer"}},
    Kind.FLOAT_LIST: {"type": "array", "items": {"type": "number"}},
    Kind.JSON: {"type": ["object", "string"]},
    Kind.JSON_LIST: {"type": ["array", "string"]},
    Kind.LAYERS: {"type": ["integer", "array", "string"]},
    Kind.TOPOLOGY: {"type": ["array", "string"]},
}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a file for `--config`. It is less strict than the reader, which also checks how values fit together."""
    typed = {group: {flag.name: flag for flag in flags().values() if flag.group == group} for group in GROUPS}
    passed = {group: dict(passthrough_flags(group)) for group in BACKENDS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Config of fuligo train",
        "type": "object",
        "additionalProperties": False,
        "properties": {group: _group(group, (typed | passed)[group]) for group in sections()},
    }


def _group(name: str, members: dict[str, Flag]) -> dict[str, Any]:
    typed = name in GROUPS
    return {
        "description": group_doc(name) if typed else f"Arguments passed on to {BACKENDS[name]}, by their names there.",
        "type": ["object", "null"],
        # Aliases and deprecated names of a backend's arguments are also accepted in a file.
        "additionalProperties": not typed,
        "properties": {member: _property(flag) for member, flag in members.items()},
    }


def _property(flag: Flag) -> dict[str, Any]:
    value = dict(_TYPES[flag.kind])
    if flag.choices:
        of_items = {"enum": [_literal(flag, choice) for choice in flag.choices]}
        value = {"type": "array", "items": of_items} if flag.kind.is_list else of_items
    bounds = {_BOUNDS[sign]: float(limit) for sign, limit in (bound.split() for bound in filter(None, flag.bounds.split(" and ")))}
    if not flag.kind.is_list:
        value |= bounds
    if flag.kind is Kind.TEXT_LIST and flag.is_path:
        value = {"anyOf": [value, {"type": "string"}]}  # a single file need not be in a list
    unit = f" [{flag.unit}]" if flag.unit else ""
    if flag.optional or flag.group in BACKENDS:
        value = {"anyOf": [value, {"type": "null"}]}
    described = value | {"description": f"{flag.doc}{unit}"}
    return described | ({"default": flag.default} if isinstance(flag.default, (bool, int, float, str)) else {})


def _literal(flag: Flag, choice: str) -> str | int | float:
    if flag.kind in (Kind.INT, Kind.INT_LIST, Kind.SIZE):
        return int(choice)
    return float(choice) if flag.kind in (Kind.FLOAT, Kind.FLOAT_LIST) else choice
