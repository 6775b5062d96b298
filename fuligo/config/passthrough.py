"""Arguments that fuligo passes on to SGLang, its router and Megatron-Core, checked against their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from fuligo.config.flag import Flag, Kind, did_you_mean, nearest
from fuligo.config.layer_pattern import layers_text
from fuligo.config.reserved import RESERVED
from fuligo.config.schemas import Schema, schema
from fuligo.config.values import checked_value


class PassThrough:
    """The arguments that were given, by name and without prefix: an immutable mapping, typed by the schema of its backend.

    Made from any mapping; names may be aliases, None leaves an argument out.
    """

    __slots__ = ("_values",)

    group: ClassVar[str]
    """The section of a config file, and the name of the schema."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            ValueError: unknown or reserved names, invalid values; all of them.
        """
        values, problems = _checked(self.schema(), given) if given else ({}, [])
        if problems:
            raise ValueError("; ".join(f"{name}: {text}" for name, text, _ in problems))
        self._values = values

    @classmethod
    def schema(cls) -> Schema:
        """What the arguments of this backend are."""
        return schema(cls.group)

    def get(self, name: str) -> Any:
        """The given value, or None.

        Raises:
            KeyError: the schema has no such argument.
        """
        return self._values.get(self._flag(name).name)

    def value(self, name: str) -> Any:
        """The given value, or the default of the schema.

        Raises:
            KeyError: the schema has no such argument.
        """
        flag = self._flag(name)
        return self._values.get(name, flag.default)

    def items(self) -> ItemsView[str, Any]:
        """Given names and values, in the order of the schema."""
        return self._values.items()

    def merged(self, other: Self) -> Self:
        """These arguments with those of `other` over them."""
        return type(self)({**self._values, **other._values})

    def command_line(self) -> list[str]:
        """The given arguments as the backend's own parser takes them: `["--dp-size", "8", "--enable-dp-attention"]`."""
        return [word for name, value in self.items() for word in _words(self.schema(), name, value)]

    def plain(self) -> dict[str, Any]:
        """What a config file holds; makes an equal object again."""
        flags = self.schema().flags
        shortened = {Kind.LAYERS: lambda value: layers_text(value) if isinstance(value, list) else value}
        return {name: shortened.get(flags[name].kind, lambda value: value)(value) for name, value in self.items()}

    def _flag(self, name: str) -> Flag:
        flag = self.schema().flags.get(name)
        if flag is None:
            raise KeyError(f"{self.schema().backend} has no argument {name}")
        return flag

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._values == self._values

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(cls.plain)
        )

    @classmethod
    def _validated(cls, given: object) -> Self:
        """For pydantic: one error for every wrong argument, each at its name."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"must hold arguments of {cls.schema().backend}")
        values, problems = _checked(cls.schema(), given)
        if problems:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    InitErrorDetails(type=PydanticCustomError("argument", "{text}", {"text": text}), loc=(name,), input=value)
                    for name, text, value in problems
                ],
            )
        made = object.__new__(cls)
        made._values = values
        return made


class SglangArguments(PassThrough):
    """Arguments of SGLang's server: `--sglang-dp-size 8` is `{"dp_size": 8}`."""

    __slots__ = ()
    group = "sglang"


class RouterArguments(PassThrough):
    """Arguments of sglang-router: `--router-policy cache_aware` is `{"policy": "cache_aware"}`."""

    __slots__ = ()
    group = "router"


class MegatronArguments(PassThrough):
    """Arguments of Megatron that no typed flag of ours covers: `--swiglu` is `{"swiglu": True}`."""

    __slots__ = ()
    group = "megatron"


def problem_with_name(backend: Schema, name: str) -> str | None:
    """Why an argument cannot be given: it is refused, or unknown; None where it can."""
    if (refused := refusal(backend, name)) is not None:
        return refused
    if backend.canonical(name) in backend.flags:
        return None
    near = _in_other_groups(backend.group, name) or nearest(name, [*backend.flags, *backend.aliases])
    return f"unknown argument of {backend.backend} {backend.version}{did_you_mean(near)}"


def refusal(backend: Schema, name: str) -> str | None:
    """What to do instead, for a name that is known and cannot be given: fuligo decides it, a typed flag covers it, or it is gone."""
    from fuligo.config.flags import flags  # which are read off Config, which holds the arguments

    canonical = backend.canonical(name)
    if canonical in RESERVED[backend.group]:
        return f"cannot be given; {RESERVED[backend.group][canonical]}"
    if backend.group == "megatron" and canonical in flags():
        return f"belongs in the group {flags()[canonical].group}, not in megatron"
    if name in backend.hints:
        return f"{backend.backend} {backend.version} has no such argument: {backend.hints[name]}"
    return None


def _in_other_groups(group: str, name: str) -> list[str]:
    """Where a name is one: `swiglu (group megatron)`."""
    from fuligo.config.flags import flags, passthrough_flags, passthrough_groups

    key = name.replace("-", "_")
    found = [flags()[key].group] if key in flags() else []
    found += [other for other in passthrough_groups() if other != group and key in passthrough_flags(other)]
    return [f"{key} (group {other})" for other in found]


def deprecation(backend: Schema, name: str, show: Callable[[str], str]) -> str | None:
    """The warning that an old name deserves, or None. `show` writes a name as the user does: as an option, or as a key."""
    alias = backend.aliases.get(name)
    if alias is None or not alias.is_deprecated:
        return None
    value = "" if alias.value is None else f" {alias.value}"
    return f"{show(name)} is {backend.backend}'s old name of {show(alias.name)}{value}, which is taken"


def _checked(backend: Schema, given: Mapping[Any, Any]) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """Typed values in the order of the schema; and (name, what is wrong, value) of each problem."""
    values: dict[str, Any] = {}
    problems: list[tuple[str, str, Any]] = []
    for given_name, given_value in given.items():
        name, value, problem = str(given_name), given_value, problem_with_name(backend, str(given_name))
        if problem is None and value is not None:
            alias = backend.aliases.get(name)
            name = alias.name if alias else name
            if name in values:
                problem = f"given twice: {name} and {given_name}"
            else:
                try:
                    values[name] = resolved_value(backend, alias.value if alias else None, name, value)
                except ValueError as error:
                    problem = str(error)
        if problem is not None:
            problems.append((str(given_name), problem, given_value))
    return {name: values[name] for name in backend.flags if name in values}, problems


def resolved_value(backend: Schema, alias_value: Any, name: str, value: Any) -> Any:
    """The typed value; a switch that stands for one value of another argument gives that value."""
    if alias_value is None:
        return checked_value(backend.flags[name], value)
    if value is not True:
        raise ValueError(f"{value!r} is not valid: it is a switch for {name} {alias_value}, give that instead")
    return alias_value


def _words(backend: Schema, name: str, value: Any) -> list[str]:
    option = backend.options.get(name, "--" + name.replace("_", "-"))
    match value:
        case True:
            return [option]
        case False:
            return [f"--no-{option.removeprefix('--')}"] if name in backend.has_negation else []
        case list() if backend.flags[name].kind.is_list:
            return [option, *map(str, value)]
        case dict() | list():
            return [option, json.dumps(value)]
    return [option, str(value)]
