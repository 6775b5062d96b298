"""Arguments that fuligo passes on to other programs, checked against the schemas of those programs."""

import json
from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, SerializationInfo, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from fuligo.config.flag import Flag, Kind
from fuligo.config.schemas import Schema, schema
from fuligo.config.secret import Secret, reveal
from fuligo.config.values import checked_value, layers_text


class PassThrough:
    """Immutable mapping of the given arguments, by name without prefix, typed by the schema of the backend.

    Built from any mapping: names may be aliases, and None leaves an argument out.
    """

    __slots__ = ("_values",)

    group: ClassVar[str]
    """Section of a config file, and name of the schema."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """Check names and values. Raises a ValueError that lists every argument with an unknown or reserved name, or an invalid value."""
        values, problems = self._checked(given) if given else ({}, [])
        if problems:
            raise ValueError("; ".join(f"{name}: {text}" for name, text, _ in problems))
        self._values = values

    @classmethod
    def schema(cls) -> Schema:
        """Return the schema of this backend's arguments."""
        return schema(cls.group)

    @classmethod
    def name_problem(cls, name: str) -> str | None:
        """Return why an argument of this name cannot be given: it is refused or unknown to the schema. None if it can."""
        backend = cls.schema()
        refused = backend.refusal(name)
        return refused if refused or backend.canonical(name) in backend.flags else backend.unknown(name)

    def get(self, name: str) -> Any:
        """Return the given value, or None. Raises KeyError if the schema has no such argument."""
        return self._values.get(self._flag(name).name)

    def value(self, name: str) -> Any:
        """Return the given value, or the default of the schema. Raises KeyError if the schema has no such argument."""
        flag = self._flag(name)
        return self._values.get(name, flag.default)

    def items(self) -> ItemsView[str, Any]:
        """Return given names and values, in the order of the schema."""
        return self._values.items()

    def merged(self, other: Self) -> Self:
        """Return these arguments, overridden by those of `other`."""
        return type(self)({**self._values, **other._values})

    def plain(self) -> dict[str, Any]:
        """Return a mapping that builds an equal object, with layer patterns in short form."""
        flags = self.schema().flags
        shortened = {Kind.LAYERS: lambda value: layers_text(value) if isinstance(value, list) else value}
        return {name: shortened.get(flags[name].kind, lambda value: value)(value) for name, value in self.items()}

    def _serialized(self, info: SerializationInfo) -> dict[str, Any]:
        """Return the values for pydantic: `plain`, in JSON mode with placeholders for secrets."""
        return {name: _shown(value) for name, value in self.plain().items()} if info.mode == "json" else self.plain()

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

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(cls._serialized, info_arg=True)
        )

    @classmethod
    def _validated(cls, given: object) -> Self:
        """Validate for pydantic: one error for every wrong argument, located at its name."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"must hold arguments of {cls.schema().backend}")
        values, problems = cls._checked(given)
        if problems:
            errors = ((name, PydanticCustomError("argument", "{text}", {"text": text}), value) for name, text, value in problems)
            details = [InitErrorDetails(type=error, loc=(name,), input=value) for name, error, value in errors]
            raise ValidationError.from_exception_data(cls.__name__, details)
        made = object.__new__(cls)
        made._values = values
        return made

    @classmethod
    def _checked(cls, given: Mapping[Any, Any]) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
        """Return typed values in the order of the schema, and (name, text, value) of each problem."""
        backend = cls.schema()
        values: dict[str, Any] = {}
        problems: list[tuple[str, str, Any]] = []
        for given_name, given_value in given.items():
            name, value, problem = str(given_name), given_value, cls.name_problem(str(given_name))
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


class SglangArguments(PassThrough):
    """Arguments of SGLang's server: `--sglang-dp-size 8` is `{"dp_size": 8}`."""

    __slots__ = ()
    group = "sglang"


class RouterArguments(PassThrough):
    """Arguments of sglang-router: `--router-policy cache_aware` is `{"policy": "cache_aware"}`."""

    __slots__ = ()
    group = "router"


def deprecation(backend: Schema, name: str, show: Callable[[str], str]) -> str | None:
    """Return the warning about an old name, or None. `show` writes a name as the user does: as an option, or as a key."""
    alias = backend.aliases.get(name)
    if alias is None or not alias.is_deprecated:
        return None
    value = "" if alias.value is None else f" {alias.value}"
    return f"{show(name)} is deprecated in {backend.backend}; using {show(alias.name)}{value}"


def resolved_value(backend: Schema, alias_value: Any, name: str, value: Any) -> Any:
    """Return the typed value, or that of a switch that is an alias for one value. Raises ValueError if the value is not valid."""
    if alias_value is None:
        return checked_value(backend.flags[name], value)
    if value is not True:
        raise ValueError(f"{value!r} is not valid: this is a switch for {name} {alias_value}; use that instead")
    return alias_value


def command_line(group: str, arguments: Mapping[str, Any] | PassThrough) -> list[str]:
    """Return the backend's command line: `["--dp-size", "8", "--enable-dp-attention"]`; arguments with the value None are left out."""
    return [word for name, value in arguments.items() if value is not None for word in _words(schema(group), name, value)]


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(entry) for entry in value]
    return str(value) if isinstance(value, Secret) else value


def _words(backend: Schema, name: str, value: Any) -> list[str]:
    option = backend.options.get(name, "--" + name.replace("_", "-"))
    match value:
        case True:
            return [option]
        case False:
            return [f"--no-{option.removeprefix('--')}"] if name in backend.has_negation else []
        case list() | tuple() if backend.flags[name].kind.is_list:
            return [option, *(str(reveal(entry)) for entry in value)]
        case dict() | list():
            return [option, json.dumps(value)]
    return [option, str(reveal(value))]
