"""Reader of `--sglang-config` files, with line numbers: `sglang: [{name: default, server_groups: [...]}]`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fuligo.config.assignments import anchored_path
from fuligo.config.flag import did_you_mean, nearest
from fuligo.config.passthrough import SglangArguments, deprecation
from fuligo.config.server_groups import ModelServers, ServerGroup
from fuligo.config.yaml_text import compose, construct, entries, read_yaml_text, yaml_problem

_SECTION = "sglang"
_MODELS = TypeAdapter(Annotated[list[ModelServers], Field(min_length=1)])
_KEYS = [*ModelServers.model_fields, *ServerGroup.model_fields]


@dataclass(slots=True)
class Topology:
    """Models and their engine groups, or the errors in them."""

    models: list[ModelServers] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_topology(file: Path) -> Topology:
    """Read a `--sglang-config` file. Never raises: errors are in `problems`."""
    try:
        text = read_yaml_text(file)
    except (OSError, ValueError) as error:
        return Topology(problems=[f"cannot read --sglang-config {file}: {getattr(error, 'strerror', None) or error}"])
    return topology_from_text(text, file)


def topology_from_text(text: str, file: Path) -> Topology:
    """Read the text of a `--sglang-config` file. Never raises: errors are in `problems`.

    `file`: path for messages and for model paths relative to it; it need not exist.
    """
    try:
        root = compose(text)
    except yaml.YAMLError as error:
        return Topology(problems=[f"--sglang-config {file} is not valid YAML: {yaml_problem(error)}"])
    entries = {str(key.value): value for key, value in root.value} if isinstance(root, yaml.MappingNode) else {}
    if list(entries) != [_SECTION]:
        return Topology(problems=[f"--sglang-config {file} must hold `sglang:` with a list of models and nothing else"])
    return topology_of(entries[_SECTION], file)


def topology_of(node: yaml.Node, file: Path) -> Topology:
    """Read the list of models in a node of a file. Never raises: errors are in `problems`."""
    try:
        twice: list[str] = []
        warnings = list(_deprecations(node, file, twice))
        plain = construct(node)
        if isinstance(plain, list):
            models = [entry for entry in plain if isinstance(entry, dict) and "model_path" in entry]
            for model in models:
                model["model_path"] = anchored_path(model["model_path"], file.parent)
        try:
            models = _MODELS.validate_python(plain)
        except ValidationError as error:
            problems = [_problem(details, node, file) for details in error.errors()]
            return Topology(problems=list(dict.fromkeys([*twice, *problems])))
        return Topology([] if twice else models, twice, warnings)
    except yaml.YAMLError as error:
        return Topology(problems=[f"{file} line {node.start_mark.line + 1}: {yaml_problem(error)}"])


def _problem(details: ErrorDetails, node: yaml.Node, file: Path) -> str:
    location = details["loc"]
    key = str(location[-1]) if location else ""
    place = f"{file} line {_line(node, location)}, {_shown(location)}"
    value = details["input"]
    match details["type"]:
        case "argument":
            return f"{place}: {details['msg']}"
        case "extra_forbidden":
            return f"{place}: unknown key {key}{_suggestion(key, location)}"
        case "missing":
            return f"{place}: {key} must be given"
        case "literal_error":
            choices = str(details.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
            return (
                f"{place}: {value!r} is not valid; it must be one of {', '.join(choices)}{did_you_mean(nearest(str(value), choices)[:1])}"
            )
    return f"{place}: {value!r} is not valid: {details['msg'][:1].lower()}{details['msg'][1:]}"


def _suggestion(key: str, location: Sequence[int | str]) -> str:
    """Suggest a key of the other level, `overrides` for an argument of SGLang, or a similar key."""
    schema = SglangArguments.schema()
    if key in schema.flags or key in schema.aliases:
        return "; put arguments of SGLang into `overrides` of a server group"
    if key in _KEYS:
        return "; it belongs to a server group" if key in ServerGroup.model_fields else "; it belongs to the model, not to a server group"
    known = ServerGroup.model_fields if "server_groups" in location[:-1] else ModelServers.model_fields
    return did_you_mean(nearest(key.replace("-", "_"), known))


def _shown(location: Sequence[int | str]) -> str:
    """Return a location as text: `model 1, group 2, overrides.dp_size`."""
    model, *rest = location or (0,)
    shown = [f"model {int(model) + 1}"]
    if len(rest) >= 2 and rest[0] == "server_groups" and isinstance(rest[1], int):
        shown.append(f"group {rest[1] + 1}")
        rest = rest[2:]
    return ", ".join([*shown, ".".join(map(str, rest))] if rest else shown)


def _line(node: yaml.Node, location: Sequence[int | str]) -> int:
    """Return the line of the deepest existing node on the way to `location`, counted from 1."""
    line = node.start_mark.line
    for step in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if str(key.value) == str(step)), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line, entry[1]
    return line + 1


def _deprecations(node: yaml.Node, file: Path, twice: list[str], *, are_overrides: bool = False) -> Iterator[str]:
    """Yield a warning for every deprecated argument in a node and those below it, and add every repeated key to `twice`."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _deprecations(child, file, twice)
    elif isinstance(node, yaml.MappingNode):
        for key, value, place in entries(node, file, twice):
            if are_overrides and (text := deprecation(SglangArguments.schema(), key, str)) is not None:
                yield f"{place}: {text}"
            yield from _deprecations(value, file, twice, are_overrides=key == "overrides")
