"""The flags as data: what the command line, the config file, `--help` and docs/flags.md share.

Typed flags are read off the groups. The groups `sglang`, `router` and `megatron` pass arguments on; their flags come from schemas.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fuligo.config import Config
from fuligo.config.flag import Flag, Kind, did_you_mean, nearest, option_name
from fuligo.config.group import FlagGroup
from fuligo.config.passthrough import PassThrough
from fuligo.config.reserved import RESERVED
from fuligo.config.schemas import schema
from fuligo.config.topology import ModelServers

__all__ = [
    "Flag",
    "Kind",
    "did_you_mean",
    "flags",
    "groups",
    "nearest",
    "option_name",
    "passthrough_flags",
    "passthrough_groups",
    "sections",
    "suggest_options",
]

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@functools.cache
def groups() -> dict[str, type[FlagGroup]]:
    """The groups of typed flags by name, in the order in which a reader meets them."""
    return {name: field.annotation for name, field in Config.model_fields.items() if _is_a(field, FlagGroup)}  # pyright: ignore[reportReturnType]


@functools.cache
def passthrough_groups() -> dict[str, type[PassThrough]]:
    """The groups that pass arguments on: `sglang`, `router`, `megatron`."""
    return {name: field.annotation for name, field in Config.model_fields.items() if _is_a(field, PassThrough)}  # pyright: ignore[reportReturnType]


def sections() -> list[str]:
    """All groups: the sections of a config file."""
    return [*groups(), *passthrough_groups()]


@functools.cache
def flags() -> dict[str, Flag]:
    """All typed flags by name. Names are unique across groups, so that the command line needs no prefix."""
    found: dict[str, Flag] = {}
    for group, model in groups().items():
        for name, field in model.model_fields.items():
            assert name not in found, f"{name} is in {found[name].group} and in {group}"
            found[name] = _describe(name, group, field)
    return found


@functools.cache
def passthrough_flags(group: str) -> dict[str, Flag]:
    """The flags that may be given in a group that passes them on, by name without prefix."""
    typed = flags()
    given = schema(group).flags.items()
    return {name: flag for name, flag in given if name not in RESERVED[group] and flag.flat_name not in typed}


def suggest_options(typed: str) -> str:
    """`; did you mean --lr (optimizer)?` for a misspelt flag, one of another backend, or one without its prefix; or nothing."""
    name = typed.strip("-").replace("-", "_")
    return did_you_mean(f"{flag.option} ({flag.group})" for flag in _similar(name))


def _similar(name: str) -> list[Flag]:
    bare = name
    for group in passthrough_groups():
        bare = bare.removeprefix(f"{group}_")
    exact = [flags()[bare]] if bare in flags() else []
    for group in passthrough_groups():
        canonical = schema(group).canonical(bare)
        if canonical in passthrough_flags(group):
            exact.append(passthrough_flags(group)[canonical])
    if exact:
        return exact
    prefixed = [group for group in passthrough_groups() if name.startswith(f"{group}_")]
    if prefixed:
        prefix = f"{prefixed[0]}_"
        known = passthrough_flags(prefixed[0]) | {
            typed.removeprefix(prefix): flag for typed, flag in flags().items() if typed.startswith(prefix)
        }
        found = [known[near] for near in nearest(bare, known)]
        if found:
            return found
    known = {flag.flat_name: flag for group in passthrough_groups() for flag in passthrough_flags(group).values()} | flags()
    return [known[near] for near in nearest(name, known)]


def _is_a(field: FieldInfo, kind: type) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, kind)


def _describe(name: str, group: str, field: FieldInfo) -> Flag:
    annotation, optional = _without_none(field.annotation)
    extra = field.json_schema_extra
    assert isinstance(extra, dict) and field.description, f"{name} is not declared by flag()"
    return Flag(
        name=name,
        group=group,
        kind=_kind(annotation),
        choices=tuple(get_args(annotation)) if get_origin(annotation) is Literal else (),
        optional=optional,
        bounds=" and ".join(f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in _BOUNDS.items() if hasattr(m, key)),
        default=field.default,
        doc=field.description,
        unit=extra.get("unit"),  # pyright: ignore[reportArgumentType]
        is_path=bool(extra.get("path")),
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(annotation) if arg is not type(None))
        return inner, True
    return annotation, False


def _kind(annotation: Any) -> Kind:
    if get_origin(annotation) is Literal:
        return Kind.CHOICE
    kinds = {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT, str: Kind.TEXT, list[str]: Kind.TEXT_LIST, list[int]: Kind.INT_LIST}
    if annotation == list[ModelServers]:
        return Kind.TOPOLOGY
    return kinds.get(annotation, Kind.JSON)
